"""Every name, signature and method of SpeedTorch is there, with its order and its defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tierstore.speedtorch as ours
from tests.every import every

torch = pytest.importorskip("torch")

MODEL = ["model_variable", "total_classes", "embed_dimension"]
OPTIMIZER = ["given_optimizer", "total_classes", "embed_dimension", "model", "variable_name"]
PIN = {"CPUPinn": False}
DEVICE = {"deviceType": "cuda", "pinType": False}
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "ModelFactory": (MODEL, {"datatype": "float32", **PIN}),
    "OptimizerFactory": (OPTIMIZER, {"dtype": "float32", **PIN}),
    "DataGadget": (["fileName"], PIN),
    "COM": (["total_classes"], {"datatype": "uint32", **PIN}),
    "ModelFactoryMM": (MODEL, {"diskname": "variable", "datatype": "float32", **PIN}),
    "OptimizerFactoryMM": (OPTIMIZER, {"dtype": "float32", **PIN}),
    "DataGadgetMM": (["fileName"], PIN),
    "COMMM": (["total_classes"], {"diskname": "COM", "datatype": "uint32", **PIN}),
    "GPUPytorchModelFactory": (MODEL, {"datatype": torch.float}),
    "GPUPytorchOptimizerFactory": (OPTIMIZER, {"dtype": torch.float}),
    "GPUPytorchCOM": (["total_classes"], {"datatype": torch.int32}),
    "CPUPytorchModelFactory": (MODEL, {"datatype": torch.float}),
    "CPUPytorchOptimizerFactory": (OPTIMIZER, {"dtype": torch.float}),
    "CPUPytorchCOM": (["total_classes"], {"datatype": torch.int32}),
    "PytorchModelFactory": (MODEL, {"datatype": torch.float, **DEVICE}),
    "PytorchOptimizerFactory": (OPTIMIZER, {"dtype": torch.float, **DEVICE}),
    "PytorchCOM": (["total_classes"], {"datatype": torch.int32}),
}
GONE = {
    *("_Common", "_CommonMM", "_GPUPytorchCommon", "_CPUPytorchCommon", "_PytorchCommon"),
    *("PMemory", "PMemoryMM", "my_pinned_allocator", "my_pinned_allocatorMM"),
}
"""Bases of its classes, which programs do not make, and its allocator of pinned memory for CuPy."""
FILES = ["saveCupy", "loadCupy", "saveTorch", "loadTorch"]
WHOLE = ["getCupyVar", "getTorchVar", "getNumpyVersion"]
SWAP = ["beforeForwardPass", "afterOptimizerStep"]
METHODS = {
    "ModelFactory": [
        *("zerosInit", "uniformDistributionInit", "normalDistributionInit", "customInit"),
        *("variableTransformer", *SWAP, *FILES, *WHOLE),
    ],
    "OptimizerFactory": ["optInit", *SWAP, *FILES, *WHOLE],
    "DataGadget": ["gadgetInit", "getData", "insertData", *FILES, *WHOLE],
    "COM": ["comInit", *FILES, *WHOLE],
}


def test_all_17_classes_are_public() -> None:
    assert sorted(ours.__all__) == sorted(SIGNATURES)
    assert len(ours.__all__) == 17


@every(name=SIGNATURES)
def test_signatures_are_speedtorchs(name: str) -> None:
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [*required, *optional]
    assert [each.name for each in positional][: len(names)] == names
    defaults = {each.name: each.default for each in positional if each.name in optional}
    assert defaults == optional
    rest = [each for each in parameters if each.name not in names]
    assert all(each.default is not each.empty for each in rest)


def test_signatures_and_methods_are_those_of_the_original(original: Any) -> None:
    public = {name for name in dir(original) if inspect.isroutine(getattr(original, name))} | {
        name for name in dir(original) if inspect.isclass(getattr(original, name))
    }
    assert public - GONE == set(ours.__all__)
    for name in SIGNATURES:
        theirs, own = getattr(original, name), getattr(ours, name)
        for method, function in inspect.getmembers(theirs, inspect.isfunction):
            if method in ("__del__", "_getReshapedRetrieval", "_preInit"):
                continue
            expected = list(inspect.signature(function).parameters.values())
            found = list(inspect.signature(getattr(own, method)).parameters.values())
            pairs = [(each.name, each.default) for each in expected]
            assert [(each.name, each.default) for each in found][: len(pairs)] == pairs, method


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_class_has_every_method_of_its_kind(name: str) -> None:
    kind = next((kind for kind in METHODS if kind in name), None)
    for method in METHODS[kind] if kind else []:
        assert inspect.isfunction(getattr(getattr(ours, name), method))
    if name.endswith("MM") and kind:
        assert inspect.isfunction(getattr(ours, name).getCupyMM)
