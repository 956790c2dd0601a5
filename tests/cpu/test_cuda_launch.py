"""Kernel launches without a GPU: the arguments that the driver would receive."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.signature import Parameter, Signature, parse, signatures


@pytest.fixture
def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the configuration of each launch."""
    found: list[dict[str, Any]] = []
    core = SimpleNamespace(
        LaunchConfig=lambda **config: config,
        launch=lambda stream, config, handle, *values: found.append(config),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
    )
    monkeypatch.setattr(launch, "_core", lambda: core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: SimpleNamespace(cuda_stream=7))
    return found


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_kernels_overlap_in_graphs_alone(
    capability: tuple[int, int],
    captured: bool,
    pdl: bool,
    recorded_launches: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "own_arch", lambda device=None: nvrtc.arch_of(*capability))
    resources = nvrtc.Resources(registers=32, spill=0, stack=0, shared=0)
    handle = SimpleNamespace(arguments_info=[])
    kernel = launch.Kernel(Signature("a.cu: b", ()), 0, handle, resources)
    for capturing in (not captured, captured, captured):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        kernel(1, 32, pdl=pdl)
    overlaps = [config["programmatic_stream_serialization"] for config in recorded_launches]
    may = pdl and capability >= (9, 0)
    assert overlaps == [may and not captured, may and captured, may and captured]
    with launch.in_order():
        kernel(1, 32, pdl=pdl)
    assert recorded_launches[-1]["programmatic_stream_serialization"] is False


SOURCE = """
#define COMMON \\
  const float* x, \\
      i64 stride
// __global__ void in_a_comment(int n) {}
template <int N>
__global__ void __launch_bounds__(32 * (N + 1), 1)
scale(COMMON, const u8* codes, float *y, void* any, Layer* layers, int n,
      float factor) {
}
"""
CPU = torch.device("cpu")


def scale() -> Signature:
    return Signature("scale.cu: scale<2>", parse(SOURCE)["scale"])


def arguments() -> dict[str, Any]:
    x = torch.zeros(4)
    codes, any_type = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.float64)
    pointers = {"x": x, "codes": codes, "y": x, "any": any_type, "layers": any_type}
    return {**pointers, "stride": 1, "n": 4, "factor": 0.5}


def test_parameters_are_read_from_the_source() -> None:
    assert list(parse(SOURCE)) == ["scale"]
    assert scale().parameters == (
        Parameter("x", "float", True),
        Parameter("stride", "i64", False),
        Parameter("codes", "u8", True),
        Parameter("y", "float", True),
        Parameter("any", "void", True),
        Parameter("layers", "Layer", True),
        Parameter("n", "int", False),
        Parameter("factor", "float", False),
    )
    with pytest.raises(ValueError, match="cannot read the parameter 'Point at'"):
        parse("__global__ void at_point(Point at) {}")


def test_every_kernel_has_a_signature() -> None:
    for file, path in nvrtc.kernel_files().items():
        assert len(signatures(file)) == path.read_text().count("__global__"), file


def test_arguments_are_bound_in_the_order_of_the_kernel() -> None:
    given = arguments() | {"layers": None}
    values = scale().bind(given, CPU)
    x, codes, any_type = (given[name].data_ptr() for name in ("x", "codes", "any"))
    assert values == [x, 1, codes, x, any_type, 0, 4, 0.5]
    assert [type(values[i]) for i in (1, 6, 7)] == [np.int64, np.int32, np.float32]
    strided = torch.zeros(4, 4)[:, 1:]
    with pytest.raises(TypeError, match="argument x: expected a contiguous tensor"):
        scale().bind(given | {"x": strided}, CPU)
    assert scale().bind(given | {"x": launch.Strided(strided)}, CPU)[0] == strided.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": "x", "x": "codes"}, "x: expected a tensor of torch.float32, found torch.uint8"),
        ({"y": "codes"}, "y: expected a tensor of torch.float32, found torch.uint8"),
        ({"y": "n"}, "y: expected a tensor or None, found int"),
        ({"n": "x"}, "n: expected bool or int or int32, found Tensor"),
        ({"n": "factor"}, "n: expected bool or int or int32, found float"),
    ],
)
def test_swapped_arguments_are_refused(change: dict[str, str], message: str) -> None:
    right = arguments()
    wrong = right | {name: right[other] for name, other in change.items()}
    with pytest.raises(TypeError, match=f"scale.cu: scale<2>, argument {message}"):
        scale().bind(wrong, CPU)


def test_numbers_of_another_size_are_refused() -> None:
    for name, value in (("n", np.int64(1)), ("stride", np.int32(1)), ("factor", np.float64(1))):
        with pytest.raises(TypeError, match=f"argument {name}: .* found {type(value).__name__}"):
            scale().bind(arguments() | {name: value}, CPU)
    with pytest.raises(OverflowError):
        scale().bind(arguments() | {"n": 1 << 31}, CPU)


def test_missing_and_unknown_names_are_refused() -> None:
    given = arguments()
    with pytest.raises(TypeError, match="missing: none; unknown: z"):
        scale().bind(given | {"z": None}, CPU)
    given["z"] = given.pop("y")
    with pytest.raises(TypeError, match="missing: y; unknown: z"):
        scale().bind(given, CPU)


def test_resources_that_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for attributes that it has, by the bindings' types."""
    driver = pytest.importorskip("cuda.bindings.driver")
    asked: list[str] = []

    def attribute(which: Any, kernel: Any, device: Any) -> tuple[Any, int]:
        assert isinstance(which, driver.CUfunction_attribute)
        asked.append(which.name.removeprefix("CU_FUNC_ATTRIBUTE_"))
        return driver.CUresult.CUDA_SUCCESS, len(asked)

    monkeypatch.setattr(driver, "cuKernelGetAttribute", attribute)
    found = launch._driver_resources(SimpleNamespace(handle=0), 0)
    assert found == nvrtc.Resources(registers=1, spill=0, stack=2, shared=3)
    assert asked == ["NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES"]


def test_two_threads_raise_the_limit_of_shared_memory(
    recorded_launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller limit, set last, made launches with more fail for good."""
    driver = pytest.importorskip("cuda.bindings.driver")
    limits, second = list[int](), threading.Event()

    def set_limit(attribute: Any, value: int, *of: Any) -> tuple[Any]:
        if value == 60000:
            other.start()
            second.wait(0.1)
        limits.append(value)
        second.set()
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", set_limit)
    monkeypatch.setattr(launch, "own_arch", lambda device=None: "sm_86")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = SimpleNamespace(max_shared_memory_per_block_optin=101376)
    launch._core().Device = lambda device: SimpleNamespace(properties=properties)
    handle = SimpleNamespace(arguments_info=[], handle=0)
    resources = nvrtc.Resources(registers=32, spill=0, stack=0, shared=0)
    kernel = launch.Kernel(Signature("a.cu: b", ()), 0, handle, resources)
    other = threading.Thread(target=lambda: kernel(1, 32, shared=80000))
    kernel(1, 32, shared=60000)
    other.join()
    assert limits == [60000, 80000] and len(recorded_launches) == 2
