"""Handwritten digits in FP8: a small network on scikit-learn's 1,797 images of 8x8, which come with it. No download.

    python examples/train_digits.py                  # all rows of the table below, seconds on one core
    python examples/train_digits.py --recipe mxfp8 --steps 600

Every recipe starts from the same weights and sees the same batches. Accuracy on the 360 images that are held out, on CPU:

    bf16         98.3%
    tensorwise   98.6%
    delayed      98.6%
    mxfp8        98.6%

An image or two are noise (and what another processor's order of summation makes); at least 97 % is tested.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron_fp8.nn import convert_to_fp8
from megatron_fp8.nn.trainer import Fp8Trainer

RECIPES = ("bf16", "tensorwise", "delayed", "mxfp8")
HELD_OUT, STEPS = 360, 300


def images_and_labels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [1437, 64] and labels, then the held-out ones; every pixel from 0 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        print(
            "error: scikit-learn, which has the images, is missing: pip install '.[examples]'",
            file=sys.stderr,
        )
        sys.exit(2)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def network() -> nn.Sequential:
    """64 pixels -> 10 classes; the first two linears become FP8, the last is too narrow for it."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy; whatever is not FP8 runs in BF16, the weights are float32."""
    images, labels = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(images)
    return cross_entropy(scores.float(), labels)


def train(recipe: str, steps: int = STEPS) -> float:
    """Train with a recipe, or 'bf16'; the accuracy on the held-out images."""
    images, labels, test_images, test_labels = images_and_labels()
    model = network()
    if recipe != "bf16":
        convert_to_fp8(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    trainer = Fp8Trainer(model, optimizer, compute_loss, clip_grad=1.0)
    batches = torch.Generator().manual_seed(2)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=batches)
        if not trainer.train_step((images[chosen], labels[chosen])).skipped:
            schedule.step()
    model.eval()
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def main() -> None:
    """Train with each recipe and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all of them, one by one")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of 64 images each (default: {STEPS})")
    chosen = parser.parse_args()
    accuracies = {recipe: train(recipe, chosen.steps) for recipe in chosen.recipe or RECIPES}
    for recipe, accuracy in accuracies.items():
        print(f"{recipe:<12} {accuracy:.1%} of {HELD_OUT} held-out images")


if __name__ == "__main__":
    main()
