"""The last step of `demo`: serve the family over HTTP and send one request."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from g4spec.cli.render import Output

PROMPT = "def area(r):"


def serve_and_ask(
    target: Path, draft: Path, n_ctx: int, n_predict: int, out: Output
) -> dict[str, Any]:
    """Serve a pair on a free local port, send one request, and stop the server.

    Returns:
        The answer of /v1/completions, or {} if the packages of `serve` are not installed.
    """
    out.line(
        "6  Serve: the same pair over HTTP, for any client of the OpenAI or Anthropic API.",
        "bold",
        gap=True,
    )
    if find_spec("starlette") is None:
        out.line("Skipped: it needs pip install 'g4spec[serve]'.")
        return {}
    import httpx

    from g4spec.runtime.engine import Engine
    from g4spec.server import addresses, run
    from g4spec.server.app import create_app
    from g4spec.server.service import Service
    from g4spec.server.settings import Settings

    with Engine.load(target, draft, n_ctx=n_ctx, parallel=2) as engine:
        service, address = Service(engine, Settings("tiny")), addresses.ServerAddress(port=0)
        listeners, ready = addresses.listen(address), threading.Event()
        server = run.create_server(create_app(service), service, address, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": listeners}, daemon=True)
        thread.start()
        ready.wait()
        url = f"{addresses.url(address, listeners)}/v1/completions"
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": n_predict, "temperature": 0}
        response = httpx.post(url, json=body, timeout=120, trust_env=False)  # no proxy
        server.should_exit = True
        thread.join()
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    timings = answer["timings"]
    out.line(f"POST {url} {PROMPT!r}:")
    out.line(repr(answer["choices"][0]["text"]))
    share = f"{timings['draft_n_accepted']} of {timings['draft_n']} drafted tokens accepted."
    out.line(f"{share} `g4spec serve -m {target} -md {draft}` serves it, with a chat page at /.")
    return answer
