"""Engines that hand over with several others, in both directions, in pairs that come and go."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config import EngineTable, parse_config
from penstock.errors import CapacityError
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import dial
from penstock_serve.engine import peers
from penstock_serve.engine.instance import build_engine
from penstock_serve.engine.requests import Output, Phase, Request
from penstock_serve.engine.spec import InstanceSpec, PairSpec
from tests.engine.test_engine import SOON_S, require_right_logits
from tests.engine.test_handoffs import CONFIG, TELLING, prompt_of
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock_serve.engine.engine import Engine


PORT_COUNT = 16


class Fleet:
    """Engines in one process, driven by turns."""

    def __init__(self, folder: Any, names: list[str], **options: Any) -> None:
        self.engines = {name: self._engine(folder, name, **options) for name in names}
        self.reported: dict[str, list[Output]] = {}

    def _engine(
        self, folder: Any, name: str, *, config: str = "", host: str = "", ports: str = "0"
    ) -> Engine:
        spec = InstanceSpec(
            name=name,
            engine=EngineTable(
                model=str(folder), step_tokens=16, step_requests=8, handoff_host=host
            ),
            config=parse_config(CONFIG + config),
            server="",
            hands_over=True,
            ports=ports,
        )
        return build_engine(spec)[0]

    def introduce(self, prefill: str, decode: str) -> None:
        pair = self.pair(prefill, decode)
        self.engines[prefill].open_pair(pair)
        self.engines[decode].open_pair(pair)

    def pair(self, prefill: str, decode: str, *, number: int = 0) -> PairSpec:
        places = {}
        for name in (prefill, decode):
            handoffs = self.engines[name].handoffs
            assert handoffs is not None
            places[name] = handoffs.peers.place()
        return PairSpec(prefill=places[prefill], decode=places[decode], number=number)

    def submit(
        self, name: str, prompt: tuple[int, ...], prefill: str, decode: str, *, handoff: str = ""
    ) -> None:
        """Has one engine compute a prompt, and another one answer it."""
        self.claim(name, prompt, prefill, decode, handoff=handoff)
        self.compute(handoff or name, prompt, prefill, decode)

    def claim(
        self, name: str, prompt: tuple[int, ...], prefill: str, decode: str, *, handoff: str = ""
    ) -> None:
        names: dict[str, Any] = {"prefill": prefill, "decode": decode}
        handoff = handoff or name
        self.engines[decode].add(
            Request(
                id=name, prompt=prompt, handoff=handoff, max_tokens=6, sampling=TELLING, **names
            )
        )

    def compute(self, handoff: str, prompt: tuple[int, ...], prefill: str, decode: str) -> None:
        request = Request(
            id=f"prompt of {handoff}",
            prompt=prompt,
            handoff=handoff,
            max_tokens=1,
            prefill=prefill,
            decode=decode,
        )
        self.engines[prefill].add(request)

    def turn(self, *, without: str = "") -> None:
        for name, engine in self.engines.items():
            for output in engine.step() if name != without else ():
                self.reported.setdefault(output.request, []).append(output)

    def until(self, condition: Callable[[], bool], *, without: str = "") -> None:
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, [self.outcomes(name) for name in self.engines]
            self.turn(without=without)

    def finish(self) -> None:
        self.until(lambda: not any(engine.unfinished for engine in self.engines.values()))
        for engine in self.engines.values():
            engine.cache.audit()
            assert engine.cache.statistics().leases == 0

    def outcomes(self, name: str) -> dict[str, int]:
        handoffs = self.engines[name].handoffs
        assert handoffs is not None
        return dict(handoffs.outcomes)

    def open_pairs(self, name: str) -> list[tuple[str, str]]:
        handoffs = self.engines[name].handoffs
        assert handoffs is not None
        return handoffs.peers.open_pairs

    def claims(self, name: str) -> int:
        return self.engines[name].scheduler.count(Phase.CLAIMING)


@contextmanager
def fleet(folder: Any, *names: str, **options: Any) -> Iterator[Fleet]:
    found = Fleet(folder, [*names], **options)
    try:
        yield found
    finally:
        for engine in found.engines.values():
            engine.close(1.0)


def test_two_prefill_and_two_decode_engines_work_in_every_combination(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    prefills, decodes = ("p0", "p1"), ("d0", "d1")
    couples = [(prefill, decode) for prefill in prefills for decode in decodes]
    with fleet(folder, *prefills, *decodes) as engines:
        prompts = {}
        for number, (prefill, decode) in enumerate(couples):
            engines.introduce(prefill, decode)
            prompts[f"r{number}"] = prompt_of(33 + number, number)
            engines.submit(f"r{number}", prompts[f"r{number}"], prefill, decode)
        engines.finish()

        for name, prompt in prompts.items():
            require_right_logits(engines.reported[name], model, prompt)
        for name in (*prefills, *decodes):
            assert engines.outcomes(name) == {"delivered": 2}


def test_a_side_that_is_opened_again_does_not_meet_the_earlier_side_of_its_peer(
    checkpoint_of: Any,
) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p", "d") as engines:
        engines.introduce("p", "d")
        engines.submit("first", prompt_of(41, 1), "p", "d")
        engines.finish()

        # The router closes the pair and opens it again, and one of the two hears of it later.
        again = engines.pair("p", "d", number=1)
        engines.engines["d"].open_pair(again)
        engines.claim("second", prompt_of(41, 2), "p", "d")
        for _ in range(200):
            engines.turn()
        engines.engines["p"].open_pair(again)
        engines.compute("second", prompt_of(41, 2), "p", "d")
        engines.finish()

        require_right_logits(engines.reported["second"], model, prompt_of(41, 2))
        assert engines.outcomes("d") == {"delivered": 2}


def test_two_engines_compute_prompts_for_each_other_at_once(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "one", "two") as engines:
        for prefill, decode in (("one", "two"), ("two", "one")):
            engines.introduce(prefill, decode)
            engines.submit(f"by {prefill}", prompt_of(41, len(prefill)), prefill, decode)
        engines.finish()

        require_right_logits(engines.reported["by one"], model, prompt_of(41, 3))
        assert engines.outcomes("one") == engines.outcomes("two") == {"delivered": 2}


def test_over_tcp_an_engine_listens_on_a_port_of_the_range(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    # Each has a listener; each connection takes two more ports.
    [first] = free_ports(1)
    with fleet(
        folder, "p", "d", host="127.0.0.1", ports=f"{first}-{first + PORT_COUNT - 1}"
    ) as engines:
        engines.introduce("p", "d")
        for name in ("p", "d"):
            handoffs = engines.engines[name].handoffs
            assert handoffs is not None
            port = int(handoffs.peers.address.rpartition(":")[2])
            assert first <= port < first + PORT_COUNT
        engines.submit("r", prompt_of(41), "p", "d")
        engines.finish()

        require_right_logits(engines.reported["r"], model, prompt_of(41))
        assert engines.outcomes("d") == {"delivered": 1}


@pytest.mark.parametrize("outcome", ["closed", "lost"])
def test_a_pair_that_is_closed_ends_its_handoffs_and_can_be_opened_again(
    checkpoint_of: Any, outcome: str
) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p", "d") as engines:
        engines.introduce("p", "d")
        engines.submit("a", prompt_of(41), "p", "d")
        engines.until(lambda: engines.claims("d") == 1, without="p")

        for name in ("p", "d"):
            engines.engines[name].close_pair("p", "d", lost=outcome == "lost")
        engines.finish()
        assert engines.outcomes("d") == {outcome: 1}
        assert (engines.open_pairs("p"), engines.open_pairs("d")) == ([], [])
        engines.introduce("p", "d")
        engines.submit("b", prompt_of(50, 1), "p", "d")
        engines.finish()

        require_right_logits(engines.reported["a"], model, prompt_of(41))
        require_right_logits(engines.reported["b"], model, prompt_of(50, 1))
        assert engines.outcomes("d") == {outcome: 1, "delivered": 1}


def test_a_pair_that_is_introduced_anew_replaces_the_one_before(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p", "d") as engines:
        engines.introduce("p", "d")
        engines.submit("a", prompt_of(41), "p", "d")
        engines.until(lambda: engines.claims("d") == 1, without="p")
        engines.engines["p"].abort_all()

        engines.introduce("p", "d")
        engines.submit("b", prompt_of(50, 1), "p", "d")
        engines.finish()

        require_right_logits(engines.reported["a"], model, prompt_of(41))
        require_right_logits(engines.reported["b"], model, prompt_of(50, 1))
        assert engines.outcomes("d") == {"closed": 1, "delivered": 1}
        assert engines.open_pairs("d") == [("p", "d")]


def test_a_prompt_is_claimed_from_another_engine_when_the_first_one_is_gone(
    checkpoint_of: Any,
) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p0", "p1", "d") as engines:
        for prefill in ("p0", "p1"):
            engines.introduce(prefill, "d")
        engines.submit("r", prompt_of(41), "p0", "d")
        engines.until(lambda: engines.claims("d") == 1, without="p0")

        engines.engines["d"].scheduler.change_prefill("r", "r/2", "p1", lost=True)
        engines.engines["d"].close_pair("p0", "d", lost=True)
        engines.engines["p0"].abort_all()
        engines.compute("r/2", prompt_of(41), "p1", "d")
        engines.finish()

        require_right_logits(engines.reported["r"], model, prompt_of(41))
        assert engines.outcomes("d") == {"lost": 1, "delivered": 1}
        assert engines.outcomes("p1") == {"delivered": 1}
        assert engines.engines["d"].handoffs is not None
        assert engines.reported["r"][0].cached_by_tier[0] == 0


def test_a_claim_that_has_not_begun_is_made_at_the_other_engine(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p0", "p1", "d") as engines:
        for prefill in ("p0", "p1"):
            engines.introduce(prefill, "d")
        engines.submit("r", prompt_of(41), "p0", "d")

        engines.engines["d"].scheduler.change_prefill("r", "r/2", "p1")
        engines.engines["p0"].abort_all()
        engines.compute("r/2", prompt_of(41), "p1", "d")
        engines.finish()

        require_right_logits(engines.reported["r"], model, prompt_of(41))
        assert engines.outcomes("d") == engines.outcomes("p1") == {"delivered": 1}


def test_pairs_that_rest_wake_up_for_a_request_and_for_their_peers(
    checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "REST_S", 0.0)
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p0", "p1", "d") as engines:
        for prefill in ("p0", "p1"):
            engines.introduce(prefill, "d")
        prompts = {f"r{number}": prompt_of(30 + 7 * number, number) for number in range(4)}
        for number, (name, prompt) in enumerate(prompts.items()):
            engines.until(lambda: all(stepped(each) == 0 for each in engines.engines.values()))
            engines.submit(name, prompt, f"p{number % 2}", "d")
            engines.finish()

        for name, prompt in prompts.items():
            require_right_logits(engines.reported[name], model, prompt)
        assert engines.outcomes("d") == {"delivered": 4}


def test_pairs_that_rest_are_one_descriptor_to_wait_for_however_many_they_are(
    checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "REST_S", 0.0)
    folder, _ = checkpoint_of("llama")
    with fleet(folder, "p", "d0", "d1") as engines:
        for decode in ("d0", "d1"):
            engines.introduce("p", decode)
            # Also a pair that is still being opened may rest, and then d1 is waited for, too.
            engines.submit(f"first of {decode}", prompt_of(30), "p", decode)
        engines.finish()
        engines.until(lambda: all(stepped(each) == 0 for each in engines.engines.values()))
        handoffs = engines.engines["p"].handoffs
        assert handoffs is not None

        watched = handoffs.peers.descriptors
        engines.claim("r", prompt_of(41), "p", "d1")
        engines.until(lambda: engines.claims("d1") == 1, without="p")
        ready = wait_any((), watched, deadline=time.monotonic() + SOON_S)

        assert len(watched) == 1
        assert ready.descriptors == tuple(watched)
        engines.compute("r", prompt_of(41), "p", "d1")
        engines.finish()
        assert engines.outcomes("d1") == {"delivered": 2}


def test_a_stranger_does_not_keep_an_engine_without_pairs_awake(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    with fleet(folder, "p") as engines:
        handoffs = engines.engines["p"].handoffs
        assert handoffs is not None
        with closing(dial(handoffs.peers.address, name="stranger")) as caller:
            deadline = time.monotonic() + SOON_S
            while not caller.is_open:
                assert time.monotonic() < deadline
                handoffs.peers.step()
                caller.receive()

            # What the stranger sent while it connected may come late; then nothing is left to do.
            for _ in range(100):
                handoffs.peers.step()
                ready = wait_any((), handoffs.peers.descriptors, deadline=time.monotonic())
                if not ready.descriptors:
                    break

            assert ready.descriptors == ()


def stepped(engine: Engine) -> int:
    """How many pairs of an engine are stepped although nothing came for them."""
    assert engine.handoffs is not None
    return len(engine.handoffs.peers._awake)


@pytest.mark.parametrize(
    ("limit", "problem"),
    [("peers_max = 1", "pairs"), ("landing_bytes_max = 33554432", "landing areas")],
)
def test_pairs_beyond_the_bounds_are_refused_and_those_open_go_on(
    checkpoint_of: Any, limit: str, problem: str
) -> None:
    folder, model = checkpoint_of("llama")
    bounds = f"[handoff]\n{limit}\nretired_bytes_max = 33554432\n"
    with fleet(folder, "p0", "p1", "d", config=bounds) as engines:
        engines.introduce("p0", "d")

        with pytest.raises(CapacityError, match=problem):
            engines.introduce("p1", "d")
        engines.submit("r", prompt_of(41), "p0", "d")
        engines.finish()

        require_right_logits(engines.reported["r"], model, prompt_of(41))
        assert engines.open_pairs("d") == [("p0", "d")]


def test_a_request_in_a_pair_that_is_not_open_is_computed_where_it_is_answered(
    checkpoint_of: Any,
) -> None:
    folder, model = checkpoint_of("llama")
    with fleet(folder, "p", "d") as engines:
        engines.submit("r", prompt_of(41), "p", "d")
        engines.finish()

        require_right_logits(engines.reported["r"], model, prompt_of(41))
        assert engines.outcomes("d") == engines.outcomes("p") == {"refused": 1}
