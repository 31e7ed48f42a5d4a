"""The decoder against transformers, token by token, however the work is cut and shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.engine.kernels.base import Kernels
from headrace.engine.models.errors import ModelError
from headrace.engine.models.weights import LoadedModel
from headrace.engine.sampler import Sampler
from support.decoders import (
    MODELS,
    Driver,
    load_quietly,
    loaded_model,
    make_kernels,
    prompt,
    reference_model,
    reference_tokens,
    saved_model,
)

COUNT = 16
LENGTHS = (1, 5, 37, 70)


@pytest.fixture(scope="module", params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded_model(name, tmp_path_factory.mktemp(name))


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return make_kernels(request.param)


@pytest.fixture(scope="module")
def expected(name: str) -> dict[int, list[int]]:
    return {length: reference_tokens(name, prompt(length), COUNT) for length in LENGTHS}


def test_alone(model: LoadedModel, kernels: Kernels, expected: dict[int, list[int]]) -> None:
    sampler = Sampler(model.config.vocab_size, (), torch.device("cpu"))
    driver = Driver(model, sampler=sampler, kernels=kernels)
    for length in LENGTHS:
        assert driver.generate(driver.sequence(prompt(length)), COUNT) == expected[length]


@pytest.mark.parametrize("size", [1, 3, 16, 50])
def test_any_chunk_size(
    model: LoadedModel, kernels: Kernels, expected: dict[int, list[int]], size: int
) -> None:
    driver = Driver(model, kernels=kernels)
    for length in LENGTHS[1:]:
        assert driver.generate(driver.sequence(prompt(length)), COUNT, size) == expected[length]


@pytest.mark.parametrize("block_size", [5, 32])
def test_any_block_size(
    model: LoadedModel, kernels: Kernels, expected: dict[int, list[int]], block_size: int
) -> None:
    driver = Driver(model, block_size=block_size, kernels=kernels)
    assert driver.generate(driver.sequence(prompt(37)), COUNT, 10) == expected[37]


def test_mixed_batch_with_preemption_and_shared_prefix(
    model: LoadedModel, kernels: Kernels, expected: dict[int, list[int]]
) -> None:
    """Sequences join at different steps, decode beside others' prompt chunks, lose their blocks
    and come back, and share the blocks of a common prefix."""
    driver = Driver(model, kernels=kernels)
    long, twin = driver.sequence(prompt(70)), driver.sequence(prompt(70))
    others = [driver.sequence(prompt(length)) for length in LENGTHS[:3]]
    driver.step(driver.chunk(long, 64), driver.chunk(others[0]))
    twin.block_table, twin.num_computed = long.block_table[:4], 64
    everyone = [*others, twin, long]
    for number in range(10_000):
        if number == 6:
            driver.drop(others[2])
        if number == 9:
            driver.drop(others[1])
        working = [sequence for sequence in everyone[: number + 2] if sequence.num_output < COUNT]
        if not working and number > len(everyone):
            break
        driver.step(*(driver.chunk(sequence, 9) for sequence in working))
    for sequence in everyone:
        answer = sequence.tokens[sequence.prompt_length :]
        assert answer == expected[sequence.prompt_length]


def test_logits_do_not_depend_on_the_batch_to_the_last_bit(
    model: LoadedModel, kernels: Kernels
) -> None:
    """In float32, at every position: alone token by token, in one chunk, and in a crowd."""
    tokens = prompt(300, seed=3)
    solo = Driver(model, kernels=kernels)
    subject = solo.sequence(tokens[:1])
    for position in range(1, 300):
        solo.step(solo.chunk(subject))
        subject.tokens[position:] = [tokens[position]]
    crowd = Driver(model, kernels=kernels)
    for cut in (1, 2, 63, 64, 65, 130, 255, 256, 257, 299):
        whole = crowd.sequence(tokens[:cut])
        rest = crowd.sequence(tokens[: cut + 1])
        crowd.chunk(whole)
        rest.block_table, rest.num_computed = whole.block_table, cut
        neighbours = [crowd.sequence(prompt(length, seed=cut)) for length in (1, 3, 40)]
        crowd.step(*(crowd.chunk(sequence) for sequence in (*neighbours, whole)))
        assert torch.equal(crowd.greedy.seen[whole.id, cut], solo.greedy.seen[subject.id, cut]), cut
        if cut == 299:
            break
        crowd.step(*(crowd.chunk(sequence) for sequence in (neighbours[0], rest, *neighbours[1:])))
        assert torch.equal(
            crowd.greedy.seen[rest.id, cut + 1], solo.greedy.seen[subject.id, cut + 1]
        ), cut
        for sequence in (whole, *neighbours):
            crowd.drop(sequence)


def test_logits_are_close_to_the_reference(name: str, model: LoadedModel, kernels: Kernels) -> None:
    tokens = prompt(200, seed=5)
    driver = Driver(model, kernels=kernels)
    sequence = driver.sequence(tokens)
    driver.step(driver.chunk(sequence))
    with torch.no_grad():
        wanted = reference_model(name)(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(driver.greedy.seen[sequence.id, 200], wanted, rtol=1e-4, atol=1e-4)


def test_parameters_count_shared_ones_once(name: str, model: LoadedModel) -> None:
    assert model.parameters == sum(value.numel() for value in reference_model(name).parameters())
    assert model.weight_bytes >= 4 * model.parameters


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    saved_model("qwen3", tmp_path)
    rows = []
    for dtype in ("fp32", "bf16"):
        driver = Driver(load_quietly(tmp_path, dtype))
        sequence = driver.sequence(prompt(40))
        driver.step(driver.chunk(sequence))
        rows.append(driver.greedy.seen[sequence.id, 40])
    assert rows[1].dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0)
    assert 0.99 < float(similarity) < 1.0


def test_missing_left_over_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    down = "model.layers.1.mlp.down_proj.weight"
    save_file({key: value for key, value in weights.items() if key != down}, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight is missing"):
        load_quietly(tmp_path)
    save_file({**weights, "model.layers.0.adapter.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match=r"layers\.0\.adapter\.weight is not supported"):
        load_quietly(tmp_path)
    save_file({**weights, down: torch.zeros(2, 3)}, path)
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \(2, 3\)"):
        load_quietly(tmp_path)


@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
def test_a_silent_config_is_tied_if_there_is_no_output_matrix(tmp_path: Path, name: str) -> None:
    saved_model(name, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    tied = config.pop("tie_word_embeddings")
    path.write_text(json.dumps(config))
    loaded = load_quietly(tmp_path)
    assert loaded.config.tied_embeddings is tied
    driver = Driver(loaded)
    answer = driver.generate(driver.sequence(prompt(5)), 4)
    assert answer == reference_tokens(name, prompt(5), 4)
