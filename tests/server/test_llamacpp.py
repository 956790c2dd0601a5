"""llama.cpp's endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.served import TEMPLATE, Served


def test_completion_whole_and_in_pieces(busy: Served, plain: Served) -> None:
    body: dict[str, Any] = {"prompt": "def main():", "n_predict": 12, "seed": 3, "n_probs": 2,
                            "return_tokens": True, "draft_max": 3, "temperature": 0.8,
                            "top_k": 40, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0,
                            "repeat_penalty": 1.1, "repeat_last_n": -1, "cache_prompt": True,
                            "timings_per_token": True}  # fmt: skip
    whole = busy.post("/completion", **body)
    pieces = busy.stream("/completion", **body)
    assert "".join(p["content"] for p in pieces) == whole["content"]
    assert [t for p in pieces for t in p["tokens"]] == whole["tokens"]
    told = [t for p in pieces for t in p.get("completion_probabilities", [])]
    assert told == whole["completion_probabilities"] and len(told) == 12
    assert {"id", "token", "bytes", "logprob", "top_logprobs"} == set(told[0])
    assert [p["stop"] for p in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    assert last["stop_type"] == "limit" and last["tokens_predicted"] == 12
    assert all("timings" in p for p in pieces)
    timings = last["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 0 < timings["draft_n"]
    assert timings["predicted_n"] == 12 and timings["prompt_n"] + timings["cache_n"] > 1
    assert whole["prompt"].endswith("def main():")
    alone = plain.post("/completion", **{**body, "draft_max": 0})
    for key in ("content", "tokens", "completion_probabilities"):
        assert alone[key] == whole[key]


def test_why_a_text_ended(busy: Served) -> None:
    plain = busy.post("/completion", prompt="x", n_predict=8, temperature=0)
    word = plain["content"][3:6]
    stopped = busy.post("/completion", prompt="x", n_predict=8, temperature=0, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert plain["content"].startswith(stopped["content"]) and word not in stopped["content"]
    ended = busy.post("/completion", prompt="x", grammar='root ::= "ab"\n')
    assert (ended["content"], ended["stop_type"]) == ("ab", "eos")
    schema = busy.post("/completion", prompt="x", json_schema={"type": "boolean"}, n_predict=9)
    assert schema["content"] in ("true", "false")


def test_a_prompt_of_texts_and_tokens(busy: Served) -> None:
    ids = busy.post("/tokenize", content="ab", add_special=True)["tokens"]
    more = busy.post("/tokenize", content="cd")["tokens"]
    mixed = busy.post("/completion", prompt=["ab", *more], n_predict=4, seed=1)
    whole = busy.post("/completion", prompt=[*ids, *more], n_predict=4, seed=1)
    assert mixed["content"] == whole["content"]
    assert mixed["tokens_evaluated"] == len(ids) + len(more)


@pytest.mark.parametrize(
    "more,said",
    [({"mirostat": 2}, "mirostat: only 0 (off) is possible here"),
     ({"typical_p": 0.9}, "typical_p: only 1"), ({"fo": 1}, "unknown field fo"),
     ({"repeat_penalty": 1.2}, "repeat_last_n"), ({"post_sampling_probs": True}, "post_sampling"),
     ({"grammar": 'root ::= "a"\n', "json_schema": {}}, "exclude each other")],
)  # fmt: skip
def test_samplers_that_are_not_there_are_refused(busy: Served, more: Any, said: str) -> None:
    assert said in busy.refused("/completion", {"prompt": "x", **more})["message"]


def test_texts_and_tokens(busy: Served) -> None:
    text = "Hé <|turn>user 😀\n"
    ids = busy.post("/tokenize", content=text, add_special=True)["tokens"]
    assert ids[0] == 2 and 105 in ids
    assert busy.post("/detokenize", tokens=ids[1:])["content"] == text
    pieces = busy.post("/tokenize", content="é😀", with_pieces=True)["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"])
                   for p in pieces)  # fmt: skip
    assert raw.decode() == "é😀"
    assert (
        "parse_special"
        in busy.refused("/tokenize", {"content": "x", "parse_special": False})["message"]
    )
    assert "outside the vocabulary" in busy.refused("/detokenize", {"tokens": [99999]})["message"]


def test_templates_are_applied(busy: Served) -> None:
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}]
    prompt = busy.post("/apply-template", messages=messages)["prompt"]
    assert prompt == ("<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
                      "<|turn>model\n<|channel>thought\n<channel|>")  # fmt: skip
    thinking = busy.post("/apply-template", messages=messages, reasoning_effort="low")["prompt"]
    assert "<|think|>" in thinking and thinking.endswith("<|turn>model\n")


def test_the_server_describes_itself(busy: Served) -> None:
    props = busy.http.get("/props").json()
    assert props["total_slots"] == 3 and props["chat_template"] == TEMPLATE
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert (props["bos_token"], props["eos_token"]) == ("<bos>", "<eos>")
    assert props["build_info"].startswith("build-g4spec-") and props["speculative"]
    assert [s["is_processing"] for s in busy.http.get("/slots").json()] == [False] * 3
    body = {"prompt": "x", "n_predict": 300, "ignore_eos": True, "stream": True}
    with busy.http.stream("POST", "/completion", json=body) as response:
        next(response.iter_lines())
        slots = busy.http.get("/slots").json()
    working = [s for s in slots if s["is_processing"]]
    assert len(working) == 1 and working[0]["n_decoded"] >= 1 and working[0]["n_remain"] < 300
