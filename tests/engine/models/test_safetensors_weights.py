from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.models.errors import ModelError
from support.decoders import Driver, load_quietly, prompt, reference_tokens, saved_model

NAME = "llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_model(NAME, tmp_path)


def _answers_like_the_reference(folder: Path) -> bool:
    driver = Driver(load_quietly(folder))
    answer = driver.generate(driver.sequence(prompt(9)), 6)
    return answer == reference_tokens(NAME, prompt(9), 6)


def test_shards(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    names = sorted(weights)
    places = {}
    for shard in range(3):
        part = f"model-{shard}.safetensors"
        save_file({name: weights[name] for name in names[shard::3]}, folder / part)
        places.update(dict.fromkeys(names[shard::3], part))
    path.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert _answers_like_the_reference(folder)


def test_names_without_prefix_and_stored_frequencies(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = {name.removeprefix("model."): value for name, value in load_file(path).items()}
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(weights, path)
    assert _answers_like_the_reference(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_in_16_bits(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path)
    loaded = load_quietly(folder)
    assert loaded.decoder.embedding.dtype == torch.float32
    driver = Driver(loaded)
    assert len(driver.generate(driver.sequence(prompt(9)), 3)) == 3


def test_generation_config_adds_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_quietly(folder).config.eos_token_ids == (5, 6)


def test_other_types_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(weights, path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is of type torch\.float8"):
        load_quietly(folder)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json"),
        ("model.safetensors", None, "model.safetensors"),
        ("model.safetensors", "junk", "model.safetensors"),
    ],
)
def test_damaged_folders_are_refused(
    folder: Path, file: str, content: str | None, named: str
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=named):
        load_quietly(folder)


@pytest.mark.parametrize("part", ["absent.safetensors", "../model.safetensors"])
def test_an_index_may_only_name_files_of_the_folder(folder: Path, part: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not in the folder"):
        load_quietly(folder)
