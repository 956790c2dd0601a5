"""The GGUF keys of tokenizers and chat templates are those that upstream's converter writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from g4spec.convert import convert, tokenizer
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.runtime.tokenizer import Tokenizer
from tests.support import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.tokenizer(tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def kv(folder: Path, config: dict[str, Any] | None = None) -> dict[str, Any]:
    generation = json.loads((folder / "generation_config.json").read_text())
    got, _ = tokenizer.from_folder(folder, config or {}, generation)
    return {k.removeprefix("tokenizer.ggml."): v.data for k, v in got.items()}


def test_tokens_types_and_ids(folder: Path) -> None:
    got = kv(folder)
    assert got["model"] == "gemma4"
    assert got["tokens"][:5] == ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    assert got["tokens"][107] == "\n" and len(got["tokens"]) == 512 == len(set(got["tokens"]))
    assert set(got["scores"].tolist()) == {-1000.0}
    kinds = got["token_type"]
    assert kinds[:6] == [3, 3, 3, 3, 3, 1]  # control, then an unused token: normal
    assert kinds[105] == kinds[106] == 3  # <|turn>, <turn|>
    for visible in (48, 49, 50, 51, 52, 100, 101):
        assert kinds[visible] == 4, got["tokens"][visible]
    assert kinds[tiny.NEWLINE] == 1 and kinds[108] == 6 == kinds[363] and kinds[364] == 1
    ids = [got[f"{n}_token_id"] for n in ("bos", "eos", "unknown", "padding", "mask")]
    assert ids == [2, 1, 3, 0, 4]
    assert got["add_bos_token"] is True and got["add_space_prefix"] is False
    assert got["tokenizer.chat_template"].startswith("{{ bos_token }}")
    assert got["g4spec.stop_ids"] == [1, 50, 106]


def test_control_tokens_equal_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    edit(
        folder / "tokenizer_config.json",
        extra_special_tokens=["<unused61>"],
        sot_token=None,
        mask_token={"content": "<unused62>", "__type": "AddedToken"},
    )
    theirs = set(AutoTokenizer.from_pretrained(folder).all_special_ids)
    got = kv(folder)
    ours = {i for i, t in enumerate(got["token_type"]) if t == 3}
    visible = {i for i, t in enumerate(got["token_type"]) if t == 4}
    assert ours == theirs - visible and 61 in ours and 105 not in ours


def test_merges_escape_spaces(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["merges"][:2] = [["a b", "c"], "x y"]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert kv(folder)["merges"][:2] == ["a\u0120b c", "x y"]


def test_added_tokens_beyond_the_vocabulary_are_user_defined(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"].append({"id": 512, "content": "<extra>", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    got = kv(folder)
    assert got["tokens"][512] == "<extra>" and got["token_type"][512] == 4


def test_added_tokens_of_the_vocabulary_are_recognised_as_a_whole(folder: Path) -> None:
    """A fine-tuned model may use an unused token, `tokenizer.add_tokens(["<unused61>"])`."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"].append(
        raw["added_tokens"][0] | {"id": 61, "content": "<unused61>", "special": False}
    )
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert kv(folder)["token_type"][60:63] == [1, 4, 1]
    tiny.target(folder / "target", layers=2, period=2)
    (folder / "target" / "tokenizer.json").write_text(json.dumps(raw))
    convert(folder / "target", folder / "x.gguf")
    text = "the<unused61> fox<unused62>"
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with GGUF(folder / "x.gguf") as file:
        ours = Tokenizer.from_gguf(file)
    assert ours.encode(text, bos=False) == theirs and theirs.count(61) == 1 and 62 not in theirs


def test_missing_special_tokens_are_read_from_the_model_configuration(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"], settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    got = kv(folder, {"eos_token_id": [1, 106], "text_config": {"pad_token_id": 7}})
    assert got["padding_token_id"] == 7 and "eos_token_id" not in got


def test_stop_ids_are_the_union_of_all_eos_token_ids(folder: Path) -> None:
    got = kv(folder, {"eos_token_id": [1, 99], "text_config": {"eos_token_id": 98}})
    assert got["g4spec.stop_ids"] == [1, 50, 98, 99, 106]


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ({"type": "Unigram", "vocab": []}, Unsupported, "BPE"),
        ({"type": "BPE", "byte_fallback": False, "vocab": {"a": 0}}, Unsupported, "byte fallback"),
        ({"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "b": 600}}, InputError, "ids"),
        ({"type": "BPE", "byte_fallback": True, "vocab": []}, InputError, "vocab"),
        ("text", Unsupported, "BPE"),
    ],
)
def test_unsupported_and_invalid_vocabularies(
    folder: Path, model: Any, error: type[InputError], says: str
) -> None:
    edit(folder / "tokenizer.json", model=model)
    with pytest.raises(error, match=says):
        kv(folder)


def test_merges_that_are_not_pairs(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["merges"] = [3]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="merges"):
        kv(folder)


def test_newer_files_of_the_template_take_precedence(tmp_path: Path) -> None:
    """transformers writes `chat_template.jinja` and may leave an older template in
    `tokenizer_config.json` or `chat_template.json`."""
    folder = tiny.target(tmp_path / "target")
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def template() -> object:
        convert(folder, tmp_path / "x.gguf")
        with GGUF(tmp_path / "x.gguf") as file:
            return file.get("tokenizer.chat_template")

    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "oldest"}))
    assert template() == "oldest"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "stale"}))
    assert template() == "stale"
    (folder / "chat_template.jinja").write_text("newest")
    assert template() == "newest"


def test_chat_templates_that_are_not_written_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with several, none of which was called default, had no template without a word. The
    file of the templates is read once."""
    folder = tiny.target(tmp_path / "target")
    read, load = list[Path](), tokenizer.load_json

    def counted(path: Path, *more: Any) -> Any:
        read.append(path)
        return load(path, *more)

    monkeypatch.setattr(tokenizer, "load_json", counted)

    def converted(*names: str) -> tuple[object, str]:
        templates = [{"name": name, "template": f"of {name}"} for name in names]
        edit(folder / "tokenizer_config.json", chat_template=templates)
        read.clear()
        made = convert(folder, tmp_path / "x.gguf")
        assert read.count(folder / "tokenizer_config.json") == 1
        with GGUF(tmp_path / "x.gguf") as file:
            template = file.get("tokenizer.chat_template")
        return template, "; ".join(note for note in made.notes if "template" in note)

    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert converted("default") == ("of default", "")
    template, note = converted("default", "rag", "tool_use")
    assert template == "of default" and "not written: rag, tool_use" in note
    template, note = converted("rag")
    assert template is None and "not written: rag" in note and "no chat template" in note
    (folder / "chat_template.jinja").write_text("main")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    template, note = converted("default", "rag")
    assert template == "main" and "not written: tool_use" in note and note.count("tool_use") == 1
