"""The runtime of a config: where it is found, who shares it, and what it keeps alive."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig as MegatronConfig

from megatron_fp8 import TransformerConfig
from megatron_fp8.mcore.iteration import announce_phases_of_load, iteration_counts, set_training_length
from megatron_fp8.mcore.runtime import Fp8Runtime, find_runtime, living_runtimes, runtime_of, state_of, watch
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.recipe import DelayedScaling
from tests.support.slots import make_slots, observe

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture(params=[MegatronConfig, TransformerConfig], ids=["Megatron's", "ours"])
def config(request):
    return request.param(**SIZES)


def test_one_for_a_config_and_for_copies_made_since(config):
    early = copy.deepcopy(config)
    assert find_runtime(config) is None
    runtime = runtime_of(config)
    assert find_runtime(config) is runtime is runtime_of(config) and state_of(config) is runtime.state
    for twin in (copy.copy(config), copy.deepcopy(config)):
        assert runtime_of(twin) is runtime
    assert find_runtime(early) is None and runtime_of(early) is not runtime, "another model's"
    assert find_runtime(dataclasses.replace(config)) is None
    hidden = set(vars(config)) - {field.name for field in dataclasses.fields(config)}
    assert hidden <= {"_fp8_runtime"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_made_before_building_is_another_model_s_however_long_the_training(config, copied):
    """Megatron's copies in building come after its model has a runtime, or have none of their own either."""
    config.fp8_high_precision_warmup = 0.5
    set_training_length(config, 10)
    twin = copied(config)
    assert find_runtime(config) is find_runtime(twin) is None and iteration_counts(twin)["fp8_gemms"] == 0
    assert runtime_of(twin) is not runtime_of(config)
    assert [state_of(c).phases.start for c in (config, twin)] == [5, 5], "both know it"
    set_training_length(twin, 20)
    assert [state_of(c).phases.start for c in (config, twin)] == [5, 10]
    state_of(twin).finish_iteration()
    assert [state_of(c).iteration for c in (config, twin)] == [0, 1]


@pytest.mark.parametrize("built", [False, True])
def test_a_resumed_training_goes_on_in_its_phase(config, built):
    config.fp8_high_precision_warmup = 0.5
    if built:
        runtime_of(config)
    set_training_length(config, 10, done=5)
    assert state_of(config).iteration == 5 and state_of(config).phase == "fp8"
    set_training_length(config, 12)
    assert state_of(config).iteration == 5 and state_of(config).phase == "warm-up", "done is unchanged"
    for done in (-1, 11, 2.0, True):
        with pytest.raises(ValueError, match="must be a whole number from 0 to iterations=10"):
            set_training_length(config, 10, done=done)


def test_a_load_before_the_first_iteration_says_that_phases_begin_there(config, capfd, monkeypatch):
    monkeypatch.setattr("megatron_fp8.mcore.iteration.living_runtimes", lambda: [runtime_of(config)])
    config.fp8_high_precision_warmup = 0.5
    set_training_length(config, 10, done=5)
    state_of(config)
    announce_phases_of_load()
    assert capfd.readouterr().err == ""
    set_training_length(config, 10, done=0)
    announce_phases_of_load()
    assert "set_training_length(config, iterations, done=N)" in capfd.readouterr().err


def test_in_another_process_it_begins_anew():
    config = TransformerConfig(**SIZES, fp8="hybrid")
    config.init_method = config.output_layer_init_method = config.embedding_init_method = None
    config.freeze()
    runtime_of(config).prepared.add(torch.nn.Linear(1, 1))
    state_of(config).iteration = 7
    again = pickle.loads(pickle.dumps(config))
    assert again.is_frozen and state_of(again).iteration == 0 and not runtime_of(again).prepared


def test_the_guard_is_the_config_s_whenever_the_runtime_came():
    """It may have come before the field was set, or in another process; a guard that began goes on."""
    config = TransformerConfig(**SIZES, fp8="hybrid")
    assert state_of(config).guard is None
    config.fp8_guard, config.fp8_guard_patience = 1, 5
    guard = state_of(config).guard
    in_fp4 = state_of(TransformerConfig(**SIZES, fp4="e2m1", fp8_guard=True)).guard
    assert in_fp4 is not None and in_fp4.ladder == ("bf16",)
    assert guard.ladder == ("bf16",) and guard.thresholds.patience == 5 and state_of(config).guard is guard
    config.init_method = config.output_layer_init_method = config.embedding_init_method = None
    config.freeze()
    assert state_of(config).guard is guard
    again = pickle.loads(pickle.dumps(config))
    assert (
        state_of(again).guard.is_set_as(guard) and state_of(again).guard is state_of(again).guard is not guard
    )


def test_each_has_its_own_verdict():
    """Either may end first; the counts of the latest are what the call without a config tells."""
    configs = [TransformerConfig(**SIZES, fp8="hybrid") for _ in range(2)]
    for ill in (0, 1):
        for order in ((0, 1), (1, 0)):
            for which in order:
                state = state_of(configs[which])
                (slot,) = state.slots() or make_slots(state.arena(None), DelayedScaling(), [E4M3])
                observe(slot, 1.0, nonfinite=int(which == ill))
                state.finish_iteration()
            assert [runtime_of(c).found_nonfinite for c in configs] == [which == ill for which in (0, 1)]
            assert [iteration_counts(c)["nonfinite"] for c in configs] == [which == ill for which in (0, 1)]


def test_nothing_keeps_it_alive():
    runtime = Fp8Runtime()
    watch(runtime)
    parameter = torch.nn.Parameter(torch.ones(1))
    model = torch.nn.Module()
    model.weight = parameter
    runtime.prepared.add(model)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert not runtime.state.missing_end, "no FP8 GEMM ran"
    runtime.state.counts.fp8_gemms = 3
    optimizer.step()
    assert not runtime.state.missing_end, "no backward came"
    runtime.state.activity.backwards = 1
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert not runtime.state.missing_end, "another model's optimizer"
    optimizer.step()
    assert runtime.state.missing_end and runtime in living_runtimes()
    gone = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert gone() is None
    optimizer.step()


def test_fast_accumulation_reaches_the_state(config):
    assert state_of(config).fast_gemms == ("fprop",)
    assert state_of(TransformerConfig(**SIZES, fp8="hybrid", fp8_fast_accumulation="none")).fast_gemms == ()
    with pytest.raises(ValueError, match="fp8_fast_accumulation='wgrad'"):
        TransformerConfig(**SIZES, fp8="hybrid", fp8_fast_accumulation="wgrad")
