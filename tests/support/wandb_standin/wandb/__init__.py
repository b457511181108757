"""What telemetry asks of Weights & Biases, where the package is not installed: calls are written to a file in `dir`."""

import json
from pathlib import Path


class _Run:
    def __init__(self, folder):
        self._path = Path(folder, "wandb-calls.jsonl")

    def tell(self, what, **facts):
        with self._path.open("a") as file:
            file.write(json.dumps({"call": what, **facts}) + "\n")

    def log(self, values, step):
        self.tell("log", step=step, values=values)

    def finish(self):
        self.tell("finish")


def init(*, project, name, id, dir, resume):
    run = _Run(dir)
    run.tell("init", project=project, name=name, id=id, resume=resume)
    return run
