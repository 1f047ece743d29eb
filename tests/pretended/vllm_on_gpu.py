"""What vLLM resolves on a made-up H100 for what models/engine.py tells it.

All other tests see vLLM without a GPU, where it takes another runner, and neither asynchrony nor
CUDA graphs. An upgrade that changes what it takes on a GPU shows here.
"""

import sys
from types import ModuleType

import cuda  # before torch
import pytest
from vllm import platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from config import Config
from models import engine

GIB = 2**30


@pytest.fixture
def h100(monkeypatch):
    """vLLM finds an H100, and its kernels."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 79 * GIB)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        device_count = classmethod(lambda cls: 1)

    cpu, gpu = platforms.current_platform, H100()
    monkeypatch.setattr(platforms, "_current_platform", gpu)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if vars(module).get("current_platform") is cpu:
            monkeypatch.setattr(module, "current_platform", gpu)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


def told(monkeypatch, **settings) -> dict:
    """What Engine tells vLLM."""
    named = {}
    monkeypatch.setattr(engine, "LLM", lambda model, **found: named.update(found, model=model))
    monkeypatch.setattr(engine.Engine, "set_version", lambda *_: None)
    engine.Engine(Config(gpu_memory_utilization=0.5, **settings))
    return named


def test_what_vllm_takes_on_a_gpu_is_what_the_docs_say(untied_model, monkeypatch, h100):
    with cuda.pretend():
        arguments = EngineArgs(**told(monkeypatch, model=str(untied_model)))
        found = arguments.create_engine_config(UsageContext.LLM_CLASS)
    scheduler, compilation = found.scheduler_config, found.compilation_config
    assert found.use_v2_model_runner
    assert scheduler.async_scheduling and found.max_concurrent_batches == 2
    assert scheduler.enable_chunked_prefill and found.cache_config.enable_prefix_caching
    assert scheduler.max_num_batched_tokens == 16384, "what the plan counts"
    assert compilation.mode.name == "VLLM_COMPILE"
    assert compilation.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert not found.kernel_config.enable_flashinfer_autotune


def test_beside_the_trainer_vllm_is_told_its_room_and_measures_none(untied_model, monkeypatch):
    with cuda.pretend():
        found = told(monkeypatch, model=str(untied_model), kv_cache_bytes=38 * GIB)
    assert EngineArgs(**found).kv_cache_memory_bytes == 38 * GIB
    assert found["gpu_memory_utilization"] <= 0.01, "or it does not start where less is free"
