"""From the body of a request for text to its answer: read, encoded, checked, and submitted.

The one rule: a request is checked as a whole before any of its prompts is sent to an instance.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, TypeVar

from penstock.engine import messages as ms
from penstock.serve import errors
from penstock.serve.answers import Reader, Telling
from penstock.serve.fields import BadRequest, shown
from penstock.serve.forms import Form
from penstock.serve.generating import Generating, Part
from penstock.serve.shapes import TOKENS_DEFAULT, TextRequest, read_chat, read_completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp

    from penstock.engine.defaults import Defaults
    from penstock.engine.text import Text
    from penstock.observe.metrics import ServerMetrics
    from penstock.serve.encoding import Encoder
    from penstock.serve.generating import Admission
    from penstock.serve.router import Router


class Asking:
    """What clients ask for, as answers in the making."""

    def __init__(
        self,
        router: Router,
        encoder: Encoder,
        text: Text,
        metrics: ServerMetrics,
        admission: Admission,
        *,
        model: str,
        defaults: Defaults,
    ) -> None:
        self._router = router
        self._encoder = encoder
        self._text = text
        self._metrics = metrics
        self._admission = admission
        self._model = model
        self._defaults = defaults

    async def completions(self, body: bytes, tenant: str) -> ASGIApp:
        """The answer to `POST /v1/completions`."""
        request = read_completion(body)
        refused = self._refusal(request, count=len(request.prompts))
        if refused is not None:
            return refused
        longest = self._facts.positions - 1
        prompts: list[list[int]] = []
        for at, prompt in enumerate(request.prompts):
            param = "prompt" if len(request.prompts) == 1 else f"prompt[{at}]"
            if isinstance(prompt, str):
                tokens = await self._encoder.encode(prompt, longest=longest, param=param)
            else:
                tokens = prompt
            _require_length(tokens, longest=longest, param=param)
            prompts.append(tokens)
        texts = [
            (given if isinstance(given, str) else self._text.decode(given))
            if request.echo
            else None
            for given in request.prompts
        ]
        return self._answer(request, prompts, texts, tenant=tenant, chat=False)

    async def chat(self, body: bytes, tenant: str) -> ASGIApp:
        """The answer to `POST /v1/chat/completions`."""
        request = read_chat(body)
        refused = self._refusal(request)
        if refused is not None:
            return refused
        longest = self._facts.positions - 1
        tokens = await self._encoder.encode_chat(request.messages, longest=longest)
        _require_length(tokens, longest=longest, param="messages")
        return self._answer(request, [tokens], [None], tenant=tenant, chat=True)

    def require_model(self, name: str | None) -> None:
        """Refuses a request for another model."""
        if name not in {None, self._model}:
            raise BadRequest(
                f"model is {shown(name)}, must be {self._model!r}", param="model", status=404
            )

    def _refusal(self, request: TextRequest, count: int = 1) -> ASGIApp | None:
        """Whether it can be answered now, before anything is encoded."""
        self.require_model(request.model)
        if count > self._admission.limit:
            raise BadRequest(
                f"prompt has {count} entries, must have at most {self._admission.limit}, which is "
                "how many requests may be under way",
                param="prompt",
            )
        refusal = self._admission.refusal(count)
        if refusal:
            self._metrics.requests.labels("refused").inc()
            return errors.busy(refusal)
        if not self._router.answering:
            return errors.unavailable("no instance is ready")
        return None

    @property
    def _facts(self) -> ms.Ready:
        facts = self._router.answering[0].ready
        assert facts is not None
        return facts

    def _answer(
        self,
        request: TextRequest,
        prompts: Sequence[list[int]],
        texts: Sequence[str | None],
        *,
        tenant: str,
        chat: bool,
    ) -> ASGIApp:
        if not self._router.answering:
            # While it was encoded, they were lost.
            return errors.unavailable("no instance is ready")
        facts = self._facts
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        parts = [
            Part(
                self._submit(
                    request, tokens, facts, name=f"{name}-{at}" if at else name, tenant=tenant
                ),
                Reader(
                    self._text,
                    Telling(
                        prompt=tokens,
                        answers=request.n,
                        stops=request.stop,
                        min_tokens=request.min_tokens,
                        logprobs=request.logprobs is not None,
                        echo=text,
                        generates=request.max_tokens != 0,
                        first_choice=at * request.n,
                    ),
                ),
            )
            for at, (tokens, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        return Generating(
            parts=parts,
            form=Form(
                id=name,
                model=self._model,
                chat=chat,
                logprobs=request.logprobs is not None,
                tiers=facts.tiers,
                text=self._text,
            ),
            stream=request.stream,
            tells_usage=request.include_usage,
            router=self._router,
            metrics=self._metrics,
            admission=self._admission,
        )

    def _submit(
        self,
        request: TextRequest,
        tokens: list[int],
        facts: ms.Ready,
        *,
        name: str,
        tenant: str,
    ) -> ms.Submit:
        defaults = self._defaults
        return ms.Submit(
            id=name,
            prompt=tokens,
            max_tokens=_max_tokens(request, room=facts.positions - len(tokens)),
            min_tokens=request.min_tokens,
            ignores_stop_tokens=request.ignore_eos,
            stop_tokens=list(request.stop_token_ids),
            answers=request.n,
            temperature=_given(request.temperature, defaults.temperature),
            top_p=_given(request.top_p, defaults.top_p),
            top_k=_given(request.top_k, defaults.top_k),
            min_p=_given(request.min_p, defaults.min_p),
            repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=list(request.logit_bias),
            seed=request.seed,
            logprobs=request.logprobs or 0,
            scores_prompt=request.scores_prompt,
            tells_logprobs=request.logprobs is not None,
            priority=request.priority,
            tenant=tenant,
            reuse=request.cache != "off",
            store=request.cache == "use",
        )


def _require_length(tokens: Sequence[int], *, longest: int, param: str) -> None:
    if not tokens:
        raise BadRequest(f"{param} is empty, must have at least one token", param=param)
    if len(tokens) > longest:
        raise BadRequest(
            f"{param} has {len(tokens)} tokens, must have at most {longest}, the longest context "
            "less one",
            param=param,
        )


def _max_tokens(request: TextRequest, *, room: int) -> int:
    """The longest answer; what a request leaves open fits in whatever the prompt leaves."""
    given = request.max_tokens
    if given is None:
        given = min(max(TOKENS_DEFAULT, request.min_tokens), room)
    if request.min_tokens > given:
        raise BadRequest(
            f"min_tokens is {request.min_tokens}, must be at most {room}, what the prompt leaves "
            "of the longest context",
            param="min_tokens",
        )
    if given > room:
        raise BadRequest(
            f"max_tokens is {given}, must be at most {room}, what the prompt leaves of the longest "
            "context",
            param="max_tokens",
        )
    # An instance always chooses one token. Who wants none hears of the prompt alone.
    return max(1, given)


ValueT = TypeVar("ValueT")


def _given(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value
