"""Quantised models from their checkpoints to tokens: transformers on the dequantised weights is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.ipc.quantization import FAMILIES
from pagewire.ipc.wire.params import SamplingParams
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.data.integers import INT8, Integers, integer_weight
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.linear import Linear, pack
from pagewire.workers.checkpoint.formats.format import Held, Parts
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import READERS
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from pagewire.workers.module import products
from pagewire.workers.module.transforms import QuantisedEmbedding, pack_joined
from pagewire.workers.network import build_layer
from pagewire.workers.network import build_module as modules
from pagewire.workers.network.network import Network
from tests.workers.architectures import EXPERTS, GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, Request, load_runner, values
from tests.workers.parity import make_prompts
from tests.workers.quantised_models import PartsFormat, SchemeOf, write_packed, write_quantised

SHAPE = GROUPED | {"intermediate_size": 128}
LLAMA = Architecture("llama", SHAPE)
PROMPTS = make_prompts(VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=0, max_tokens=10)
SCHEMES = {
    "int8": Integers(8, None, 128),
    "int8 groups": Integers(8, 32, 128),
    "int4": Integers(4, 32, 8),
    "int4 with offsets": Integers(4, 64, 0),
}


@pytest.fixture
def parts_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "format_of", lambda _: PartsFormat())


def linears_of(scheme: Integers) -> SchemeOf:
    return lambda module: scheme if module.endswith("_proj") else None


def check_against_transformers(requests: list[Request], plain: Path, tolerance: float) -> None:
    """Greedy tokens are transformers' where their margin is not small; log probabilities are near."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    compared = 0
    for request in requests:
        tokens = torch.tensor([request.prompt + request.output])
        with torch.inference_mode():
            expected = model(tokens).logits[0].log_softmax(-1)
        start = len(request.prompt) - 1
        for position, token in enumerate(request.output, start):
            best = expected[position].topk(2)
            if best.values[0] - best.values[1] > tolerance / 2:
                assert token == int(best.indices[0]), position
                compared += 1
        known = [value for rows in request.prompt_logprobs for value in values(rows)[1]]
        exact = expected[torch.arange(start), tokens[0, 1 : start + 1]]
        assert known == pytest.approx(exact.tolist(), abs=tolerance)
    assert compared >= sum(len(request.output) for request in requests) / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_awq(dtype: str, tmp_path: Path) -> None:
    folder, plain = write_packed(LLAMA.write(tmp_path / "dense"), tmp_path)
    runner, ready = load_runner(folder, dtype=dtype)
    assert type(runner.model.model.base) is Network
    requests = Driver(runner).run(PROMPTS, 10, GREEDY)
    check_against_transformers(requests, plain, 0.4)
    # A row's bits do not depend on the batch that it is in.
    crowd = Driver(runner, budget=64).run((PROMPTS * 4)[:8], 10, GREEDY)
    for request, other in zip(requests, crowd, strict=False):
        alone = Driver(runner).run([request.prompt], 10, GREEDY)[0]
        assert alone.output == request.output == other.output
        assert alone.logprobs == request.logprobs == other.logprobs
    dense = load_runner(plain, dtype=dtype)[1].weight_bytes
    assert ready.weight_bytes < 0.7 * dense


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme(name: str, parts_format: None, tmp_path: Path) -> None:
    folder, plain = write_quantised(LLAMA.write(tmp_path / "dense"), tmp_path, linears_of(SCHEMES[name]))
    runner, _ = load_runner(folder)
    check_against_transformers(Driver(runner).run(PROMPTS, 10, GREEDY), plain, 0.4)


MIXED: dict[str, SchemeOf] = {
    "bits": lambda module: SCHEMES["int8" if module.endswith("v_proj") else "int4"],
    "groups and zeros": lambda module: SCHEMES["int4 with offsets" if module.endswith("up_proj") else "int4"],
    "a dense part": lambda module: None if module.endswith(("k_proj", "gate_proj")) else SCHEMES["int4"],
    "dense layers": lambda module: None if "layers.0." in module else SCHEMES["int8 groups"],
}


@pytest.mark.parametrize("name", MIXED)
def test_parts_of_one_product_in_different_schemes(name: str, parts_format: None, tmp_path: Path) -> None:
    mixed = MIXED[name]
    folder, plain = write_quantised(
        LLAMA.write(tmp_path / "dense"), tmp_path, lambda m: mixed(m) if m.endswith("_proj") else None
    )
    runner, _ = load_runner(folder)
    assert type(runner.model.model.base) is Network
    check_against_transformers(Driver(runner).run(PROMPTS, 6, GREEDY), plain, 0.4)


def test_experts(parts_format: None, tmp_path: Path) -> None:
    sizes = EXPERTS | {"moe_intermediate_size": 64}
    source = Architecture("qwen3_moe", SHAPE | sizes).write(tmp_path / "dense")
    folder, plain = write_quantised(source, tmp_path, linears_of(SCHEMES["int8 groups"]))
    runner, _ = load_runner(folder)
    stack = runner.model.model.base.stack
    assert stack.compiled is not None
    experts = stack.layers[0].mixture.experts
    assert isinstance(experts.up[0].scheme, Integers) and isinstance(experts.down[3].scheme, Integers)
    check_against_transformers(Driver(runner).run(PROMPTS, 6, GREEDY), plain, 0.4)


@pytest.mark.parametrize("stacked", [True, False], ids=["stack", "modules"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embedding_and_output_layer_in_their_own_type(
    tied: bool, stacked: bool, parts_format: None, tmp_path: Path
) -> None:
    name = "llama" if stacked else "diffllama"
    source = Architecture(name, SHAPE | {"tie_word_embeddings": tied}).write(tmp_path / "dense")
    folder, plain = write_quantised(
        source,
        tmp_path,
        lambda m: SCHEMES["int8 groups"] if m.endswith(("embed_tokens", "lm_head")) else None,
    )
    runner, ready = load_runner(folder)
    model = runner.model.model
    assert isinstance(model.base, Network) == stacked
    embedding = model.base.words
    assert isinstance(embedding, QuantisedEmbedding)
    ids = torch.randint(0, VOCAB_SIZE, (3, 5))
    assert torch.equal(embedding(ids), embedding.rows.dense()[ids])
    check_against_transformers(Driver(runner).run(PROMPTS, 6, GREEDY), plain, 0.4)
    assert ready.weight_bytes < load_runner(plain)[1].weight_bytes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_plain_numbers_are_quantised_while_they_are_loaded(quantization: str, tmp_path: Path) -> None:
    """The proof compares with the quantised weights, so that 4 bits pass it, too."""
    folder = LLAMA.write(tmp_path)
    _, plain = load_runner(folder)
    for load_format in ("auto", "dummy"):
        runner, ready = load_runner(folder, quantization=quantization, load_format=load_format)
        assert ready.weight_bytes < 0.6 * plain.weight_bytes
        alone = Driver(runner).generate([PROMPTS[0]], 5)
        assert alone == Driver(runner, budget=64).generate(PROMPTS, 5)[:1]


def wrong_zero(weight: Weight) -> Weight:
    """The same codes around a zero that is off by 1."""
    assert isinstance(weight.scheme, Integers)
    return replace(weight, scheme=replace(weight.scheme, zero=weight.scheme.zero + 1))


def swapped_halves(weight: Weight) -> Weight:
    """Neighbouring columns in each other's place."""
    codes, *others = weight.parts
    assert isinstance(weight.scheme, Integers)
    if weight.scheme.bits == 4:
        swapped = codes >> 4 | codes << 4
    else:
        swapped = codes.unflatten(1, (-1, 2)).flip(-1).flatten(1)  # type: ignore[no-untyped-call]
    return replace(weight, parts=(swapped, *others))


def swapped_heads(weight: Weight) -> Weight:
    """The first two heads in each other's place."""
    order = torch.arange(weight.shape[0])
    order[:32] = order[:32].roll(16)
    return weight.take(order)


Fault = Callable[[Weight], Weight]


def load_with(
    fault: Fault | None, folder: Path, monkeypatch: pytest.MonkeyPatch, product_proof: bool, **fields: str
) -> None:
    """Load a model whose quantised weights are packed wrongly."""

    def wrong(weight: Weight, bias: torch.Tensor | None, device: torch.device) -> Linear:
        is_wrong = fault is not None and isinstance(weight.scheme, Integers)
        return pack(fault(weight) if is_wrong and fault is not None else weight, bias, device)

    with monkeypatch.context() as patch:
        patch.setattr(products, "pack", wrong)
        if not product_proof:
            patch.setattr(products, "check_product", lambda *_: None)
        load_runner(folder, **fields)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_wrong_model_is_refused(
    name: str, parts_format: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product is proven; the model as a whole as well, which a zero of 8 bits that is off by 1 may pass."""
    scheme, seed = SCHEMES[name], list(SCHEMES).index(name)
    folder, _ = write_quantised(LLAMA.write(tmp_path / "dense", seed=seed), tmp_path, linears_of(scheme))
    for dtype in ("float32", "bfloat16"):
        load_with(None, folder, monkeypatch, False, dtype=dtype)
    for fault in (wrong_zero, swapped_halves, swapped_heads):
        with pytest.raises(LoadError, match=r"the product with a weight .* is wrong"):
            load_with(fault, folder, monkeypatch, True)
        if fault is not wrong_zero or scheme.bits == 4:
            with pytest.raises(LoadError, match="its logits with paged attention are wrong"):
                load_with(fault, folder, monkeypatch, False)


def wrong_scales(weight: Weight) -> Weight:
    """The scales of two neighbouring rows in each other's place."""
    codes, scales, *offsets = weight.parts
    swapped = scales.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)  # type: ignore[no-untyped-call]
    return replace(weight, parts=(codes, swapped, *offsets))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_wrong_model_of_weights_quantised_while_loading_is_refused(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference quantises the checkpoint's numbers itself, so that it does not share a fault of packing."""
    folder = LLAMA.write(tmp_path, dtype="bfloat16")
    load_with(None, folder, monkeypatch, False, quantization=quantization)
    for fault in (wrong_zero, wrong_scales, swapped_halves, swapped_heads):
        with pytest.raises(LoadError, match=r"the product with a weight .* is wrong"):
            load_with(fault, folder, monkeypatch, True, quantization=quantization)
    for fault in (swapped_halves, swapped_heads):
        with pytest.raises(LoadError, match="its logits with paged attention are wrong"):
            load_with(fault, folder, monkeypatch, False, quantization=quantization)


def test_a_weight_in_anothers_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is right by itself then; the logits are not, and the layers are packed one by one."""
    folder = LLAMA.write(tmp_path)
    runner, _ = load_runner(folder, quantization="int8")
    assert runner.model.is_stack
    monkeypatch.setattr(build_layer, "pack_joined", lambda linears, *rest: pack_joined(linears[::-1], *rest))
    runner, _ = load_runner(folder, quantization="int8")
    assert not runner.model.is_stack


def test_the_door_knows_every_format_that_is_read() -> None:
    assert READERS.keys() <= FAMILIES.keys()


def test_missing_parts_and_methods_that_are_not_served(tmp_path: Path) -> None:
    folder, _ = write_packed(LLAMA.write(tmp_path / "dense"), tmp_path)
    with pytest.raises(ValueError, match="'gptq', but the checkpoint is quantised with 'awq'"):
        load_runner(folder, quantization="gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.scales")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj"):
        load_runner(folder)
    overrides = {"quantization_config": {"quant_method": "quanto"}}
    with pytest.raises(LoadError, match="quantised with 'quanto' are not served; those of aqlm, "):
        load_runner(folder, hf_overrides=overrides)
    with pytest.raises(LoadError, match="awq cannot be read as a whole: load_format is 'pt'"):
        load_runner(folder, load_format="pt")


class StacksFormat(PartsFormat):
    """Stacks of int8 matrices that transformers' module holds transposed, and matrices with dotted suffixes."""

    suffixes = frozenset({"_codes", "_scales", "weight", "weight.scales"})
    transposed = True

    def stored(self, name: str, tensors: Parts) -> Held:
        if "weight" in tensors:
            return tensors["weight"].shape, NumberFormat(8)
        experts, rows, columns = tensors["_codes"].shape
        return (experts, columns, rows), NumberFormat(8)

    def weight(self, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        return integer_weight(INT8, tensors["weight"], tensors["weight.scales"], None, dtype)

    def stacked(self, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[Weight]:
        for codes, scales in zip(tensors["_codes"], tensors["_scales"], strict=True):
            yield integer_weight(INT8, codes, scales, None, dtype)


def test_names_are_those_of_a_dense_checkpoint(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (2, 6, 4)).to(torch.uint8)
    scales = torch.rand(2, 6, 1)
    tensors = {
        "experts.up_proj_codes": codes,
        "experts.up_proj_scales": scales,
        "linear.weight": codes[0].clone(),
        "linear.weight.scales": scales[0].clone(),
        "linear.bias": torch.rand(6),
        "norm.weight": torch.rand(4).half(),
        "broken.weight": codes[0].clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = QuantisedCheckpoint(Checkpoint(tmp_path), StacksFormat())
    names = ["broken.weight", "experts.up_proj", "linear.bias", "linear.weight", "norm.weight"]
    assert sorted(checkpoint.names) == names
    matrices = (codes.float() - 128) * scales
    assert torch.equal(checkpoint.read("linear.weight"), matrices[0])
    assert torch.equal(checkpoint.weight("linear.weight", torch.float32).dense(), matrices[0])
    assert torch.equal(checkpoint.read("experts.up_proj"), matrices.mT)
    experts = [one.dense() for one in checkpoint.stacked("experts.up_proj", torch.float32, True)]
    assert torch.equal(torch.stack(experts), matrices)
    with pytest.raises(LoadError, match="holds no stacks of matrices of this form"):
        list(checkpoint.stacked("experts.up_proj", torch.float32, False))
    for name in names:
        assert checkpoint.on_meta(name).device.type == "meta"
        if name != "broken.weight":
            assert checkpoint.on_meta(name).shape == checkpoint.read(name).shape
    assert checkpoint.read("norm.weight").dtype == torch.float16
    with pytest.raises(LoadError, match=r"broken.weight: its tensor 'weight.scales' is missing"):
        checkpoint.read("broken.weight")
    checkpoint.let_go()
