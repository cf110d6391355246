"""/v1/embeddings: the mean of the last hidden states of a text's tokens, normalized to length 1."""

import asyncio
import base64
import threading

import torch

from gptworks.errors import RunError
from gptworks.infer.backends.backend import Backend
from gptworks.serve import openai
from gptworks.serve.service import Caller, Service


def embed(reader: Backend, ids: list[int]) -> list[float]:
    """Return a text's embedding, of length 1; raises a RunError if the model's hidden states are not finite."""
    mean = reader.read(ids).mean(0)
    if not mean.isfinite().all():
        raise RunError("the model's hidden states are not finite.")
    numbers: list[float] = torch.nn.functional.normalize(mean, dim=0).tolist()
    return numbers


async def embeddings(service: Service, body: openai.EmbeddingRequest, caller: Caller) -> openai.EmbeddingResponse:
    """Embed a request's texts one by one in the embedding thread; stop early if the client leaves."""
    model, gone = await service.model(body.model, caller), threading.Event()
    service.take_places(caller, len(body.input))

    def work() -> list[tuple[int, list[float]]]:
        found = []
        for text in body.input:
            if gone.is_set():
                break
            ids = model.tokens.read(text, "input")
            found.append((len(ids), embed(model.reader, ids)))
        return found

    try:
        found = await asyncio.get_running_loop().run_in_executor(service.embedding_thread, work)
    finally:
        gone.set()
    n_tokens = caller.n_tokens = sum(n for n, _ in found)
    as_text = body.encoding_format == "base64"
    return openai.EmbeddingResponse(
        object="list",
        data=[
            openai.Embedding(object="embedding", index=i, embedding=_base64(numbers) if as_text else numbers)
            for i, (_, numbers) in enumerate(found)
        ],
        model=model.name,
        usage=openai.EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
    )


def _base64(numbers: list[float]) -> str:
    """Encode the numbers as little-endian float32, in base64."""
    return base64.b64encode(torch.tensor(numbers).numpy().astype("<f4").tobytes()).decode()
