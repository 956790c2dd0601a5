"""Answers assembled from cycles do not depend on how tokens are spread over cycles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.core import Cycle
from g4spec.runtime.request import Options, Request
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import chat
from g4spec.server.fields import ChatRequest
from g4spec.server.generation import Assembler, Delta, PlainReader, Token
from g4spec.server.output_parser import AnswerStream, Event, Marks, Parser, TextEvent, merge_events
from g4spec.server.response_parts import CompletionLogprobs

MARKS = Marks(105, 106, 100, 101, 48, 49, 50, 52)


def logprobs(token: int) -> tuple[float, list[tuple[int, float]]]:
    return -token / 8, [(token, -token / 8), (0, -600.0)]


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    cuts: list[int],
    stops: tuple[str, ...],
    chat: bool,
    told: bool = True,
    end: str = "length",
) -> tuple[list[Event], Delta, list[Token], Request]:
    """Return what a client receives of a request with tokens `ids` in cycles that end at `cuts`."""
    parser = Parser(tokenizer, MARKS)
    stream = (lambda: AnswerStream(Parser(tokenizer, MARKS))) if chat else None
    options = Options(len(ids), stop=stops, stream=stream)
    request = Request([2], options, None, tokenizer)  # type: ignore[arg-type]
    assembler = Assembler(
        parser if chat else PlainReader(tokenizer), stops, tokenizer.control_ids | {100, 101}
    )
    events, tokens = [], []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        if not request.stats.stop_reason and start < stop:
            part = ids[start:stop]
            cycle = Cycle(part, [0.0] * len(part), logprobs=[logprobs(t) for t in part])
            request.append(cycle)
            if not told:
                cycle.logprobs = []
            delta = assembler.cycle(cycle)
            events += delta.events
            tokens += delta.tokens
    request.finish(end)
    last = assembler.finish(request.stats)
    return [*events, *last.events], last, [*tokens, *last.tokens], request


def answer(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextEvent))


CALL = '<|tool_call>call:f{a:<|"|>STOP<|"|>}<tool_call|>'
PARTS = [
    "<|channel>thought\n",
    "hm\n<channel|>",
    "<channel|>",
    "STOP",
    "ST",
    "OP",
    "S",
    "é",
    "😀",
    " a",
    "b",
    "\n",
    CALL,
    "<turn|>",
]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_text_does_not_depend_on_cycles(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=10)))
    ids = tokenizer.encode(text, bos=False) + data.draw(st.lists(st.integers(110, 400), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stops = data.draw(st.sampled_from([(), ("STOP",), ("TOP", "ST"), ("OPé", "b\n"), ("a",)]))
    chat = data.draw(st.booleans())
    each = list(range(1, len(ids)))
    one = run(tokenizer, ids, each, stops, chat)
    got = run(tokenizer, ids, cuts, stops, chat)
    assert merge_events(got[0]) == merge_events(one[0])
    assert (got[1].finish, got[1].stop, got[2]) == (one[1].finish, one[1].stop, one[2])
    # The engine stopped at the end of the client's text.
    assert answer(got[0]) == got[3].text
    assert (got[1].stop is not None) == (got[3].stats.stop_reason == "stop string")


def test_each_token_of_the_text_has_its_log_probability(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|channel>thought\nhm\n<channel|>Hi é😀", bos=False)
    _, _, tokens, _ = run(tokenizer, ids, [], (), True)
    answer_ids = ids[ids.index(101) + 1 :]
    assert [t.id for t in tokens] == answer_ids
    assert [(t.logprob, t.top) for t in tokens] == [logprobs(t) for t in answer_ids]
    _, _, tokens, _ = run(tokenizer, ids, [], (), False)
    assert [t.id for t in tokens] == ids
    assert run(tokenizer, ids, [], (), True, told=False)[2] == []


def test_text_is_held_back_only_while_it_may_become_a_stop(tokenizer: Tokenizer) -> None:
    stops, full = ("STOP", "Tor"), "SSaS STO To é TXSTOPb"
    assembler = Assembler(PlainReader(tokenizer), stops)
    shown, read, tokens = "", "", list[int]()
    stream = tokenizer.stream()
    for token in tokenizer.encode(full, bos=False):
        read += stream.push([token])
        delta = assembler.cycle(Cycle([token], [0.0], logprobs=[logprobs(token)]))
        assert all(isinstance(event, TextEvent) and event.text for event in delta.events)
        shown, tokens = shown + answer(delta.events), tokens + [t.id for t in delta.tokens]
        if "STOP" in read:
            break
        held = max(n for n in range(4) for s in stops if n < len(s) and read.endswith(s[:n]))
        assert shown == read[: len(read) - held]
        assert len(tokenizer.decode(tokens)) <= len(shown) + 1
    assert shown == "SSaS STO To é TX"
    assert tokens == tokenizer.encode(full, bos=False)[: len(tokens)]
    assert tokenizer.decode(tokens).rstrip() == shown


def test_reasoning_tokens_are_counted(tokenizer: Tokenizer) -> None:
    """Count those of its header and its end mark too."""
    ids = tokenizer.encode("So <|channel>thought\nhm, é\n<channel|>Hi", bos=False)
    for size in (1, 3, len(ids)):
        assembler = Assembler(Parser(tokenizer, MARKS), (), tokenizer.control_ids)
        for start in range(0, len(ids), size):
            assembler.cycle(Cycle(ids[start : start + size], []))
        assert assembler.thoughts == ids.index(101) - ids.index(100)


def test_finish_reasons(tokenizer: Tokenizer) -> None:
    def reason(text: str, stops: tuple[str, ...] = (), end: str = "length") -> tuple[Any, Any]:
        delta = run(tokenizer, tokenizer.encode(text, bos=False), [], stops, True, end=end)[1]
        return delta.finish, delta.stop

    call = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    assert reason("Hi") == ("length", None)
    assert reason("Hi", end="context") == ("length", None)
    assert reason("Hi<turn|>") == ("stop", None)
    assert reason("Hi there", ("th", "x")) == ("stop", "th")
    assert reason(call + "<turn|>") == ("tool_calls", None)
    assert reason(call) == ("length", None)
    assert reason(call + "Hi", ("Hi",)) == ("stop", "Hi")


def test_logprobs_of_completions_count_whole_characters(tokenizer: Tokenizer) -> None:
    """A character of several tokens counts once, wherever a stream is cut, and tokens that the
    text does not show not at all. Parts of it have names as in OpenAI's API, one for each."""
    text = "a\U0001f642b"
    ids = [*tokenizer.encode(text)[1:], min(tokenizer.control_ids)]
    parts = [tokenizer.piece(i, special=True) for i in ids]
    assert len(ids) == 7 and [len(part) for part in parts[1:5]] == [1] * 4
    tokens = [Token(i, -1.0, [(i, -1.0) for i in ids]) for i in ids]
    whole = CompletionLogprobs(tokenizer).of(tokens)
    assert whole["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert whole["tokens"][:6] == [
        "a",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x99",
        "bytes:\\x82",
        "b",
    ]
    assert all(list(top) == whole["tokens"] for top in whole["top_logprobs"])
    for cut in range(1, len(tokens)):
        streamed = CompletionLogprobs(tokenizer)
        first, second = streamed.of(tokens[:cut]), streamed.of(tokens[cut:])
        assert {key: first[key] + second[key] for key in whole} == whole


def test_streams_have_no_chunk_before_the_first_token() -> None:
    """Load generators take the first chunk for the first token."""
    texts = [SimpleNamespace(index=i) for i in range(2)]
    computed: list[int] = []

    async def deltas() -> AsyncIterator[tuple[Any, Delta]]:
        for text in texts:
            computed.append(text.index)
            yield text, Delta([TextEvent("a")])

    named = SimpleNamespace(settings=SimpleNamespace(model="m"))
    generation: Any = SimpleNamespace(texts=texts, deltas=deltas, service=named, id="1", created=0)

    async def received() -> list[tuple[int, dict[str, Any], list[int]]]:
        out = []
        async for each in chat.stream_response(
            generation, ChatRequest(messages=[{"role": "user"}])
        ):
            if "[DONE]" not in each:
                choice = json.loads(each.removeprefix("data: "))["choices"][0]
                out.append((choice["index"], choice["delta"], list(computed)))
        return out

    begin = {"role": "assistant", "content": None, "refusal": None}
    assert asyncio.run(received()) == [
        (i, delta, list(range(i + 1))) for i in range(2) for delta in (begin, {"content": "a"})
    ]
