"""Tokens per second of `coterie serve`, beside `generate` with a PEFT LoRA adapter.

    python benchmarks/serve.py runs/assistants --plugin examples/lindenhof.py

The requests go through HTTP on this machine. PEFT's adapter has rank 8 on all linear layers of the
same base, in the same process, and answers one request after another. All contestants take turns,
so that the ratios are of one time. The answers are of equal length, whatever the models say.
"""

import argparse
import asyncio
import random
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from common import options_of, show, write
from peft import LoraConfig, get_peft_model

from coterie.adapters import detach
from coterie.bases import load_base
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig
from coterie.evaluation.generation import Sampling, ends_of
from coterie.inference.finished import recorded
from coterie.network.address import listen
from coterie.runs import RunFolder
from coterie.serve import app
from coterie.serve.models import Models

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = ("1/1", "4/1", "16/1", "4/4", "16/4")
"""Numbers of concurrent requests, and of models that they ask for."""


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    for plugin in options.plugin:
        load_plugin(plugin)
    config = recorded(RunFolder(options.run))
    models = Models([options.run])
    own = [model.name for model in models.by_name.values() if model.own]
    app.ends_of = lambda *_: ([-1], [])  # no answer ends before its last token
    address = serving(models)
    peft = peft_generate(config)
    work: dict[str, Any] = {"PEFT": peft}
    for case in options.cases:
        requests, asked = map(int, case.split("/"))
        names = [own[number % asked] for number in range(requests)]
        work[case] = partial(answered, address, names)
    for generate in work.values():
        generate(2)  # to warm up
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        for name, generate in work.items():
            start = time.perf_counter()
            generate(options.tokens)
            seconds[name].append(time.perf_counter() - start)
    alone = options.tokens / statistics.median(seconds["PEFT"])
    speeds = {"PEFT": alone}
    rows = [["generate with PEFT's LoRA", "1", "1", f"{alone:.1f}", "1.00"]]
    for case in options.cases:
        requests, asked = case.split("/")
        speeds[case] = int(requests) * options.tokens / statistics.median(seconds[case])
        cells = [requests, asked, f"{speeds[case]:.1f}", f"{speeds[case] / alone:.2f}"]
        rows.append(["coterie serve", *cells])
    columns = ["", "requests", "models", "tokens/s", "ratio"]
    show("Throughput", columns, rows, f"Medians of {options.rounds} rounds.")
    write(options, speeds=speeds, seconds=seconds)


def parser() -> argparse.ArgumentParser:
    form = options_of(__doc__)
    form.add_argument("run", type=Path, help="finished run on conversations, of four clients")
    form.add_argument("--plugin", action="append", default=[], help="plugin of the run")
    form.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    form.add_argument("--rounds", type=int, default=3)
    form.add_argument(
        "--cases", nargs="+", default=CASES, help="numbers of requests and models; default: all"
    )
    return form


def prompts(count: int) -> list[str]:
    """Return questions of different lengths; every call returns equal ones."""
    draw = random.Random(0)
    words = ["when", "do", "you", "close", "who", "can", "help", "with", "the", "old", "boiler"]
    return [" ".join(draw.choices(words, k=draw.randint(4, 20))) + "?" for _ in range(count)]


def serving(models: Models) -> str:
    """Serve models in a thread of this process, and return the address."""
    listening = listen("127.0.0.1:0")
    serve = app.serve_until_cancelled(models, listening, [], app.Limits())
    threading.Thread(target=lambda: asyncio.run(serve), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def answered(address: str, names: list[str], tokens: int) -> None:
    """Ask all questions at the same time, and wait for the answers."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=600, verify=False) as client:
            bodies = [
                {
                    "model": name,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": tokens,
                    "temperature": 0,
                }
                for name, prompt in zip(names, prompts(len(names)), strict=True)
            ]
            posts = [client.post("/v1/chat/completions", json=body) for body in bodies]
            for reply in await asyncio.gather(*posts):
                assert reply.json()["usage"]["completion_tokens"] == tokens

    asyncio.run(ask())


def peft_generate(config: RunConfig) -> Any:
    """Return a function that generates one answer with a PEFT adapter on a base of its own."""
    base = load_base(config.base, None, config.data.window, config.root)
    detach(base.model)
    lora: Any = LoraConfig(r=8, target_modules=LINEARS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base.model, lora).eval()
    text = f"<|im_start|>user\n{prompts(1)[0]}<|im_end|>\n<|im_start|>assistant\n"
    ids: Any = base.tokenizer(text, return_tensors="pt")

    @torch.no_grad()
    def generate(tokens: int) -> None:
        sampling = Sampling(tokens).config(ends_of(base.tokenizer, ())[0])
        sampling.min_new_tokens = tokens
        model.generate(**ids, generation_config=sampling)

    return generate


if __name__ == "__main__":
    main()
