"""A Ctrl-C at any line of the engine loses nothing; other exceptions neither, or it refuses."""

import contextlib
import inspect
import signal
import sys
from collections import Counter
from functools import cache

import pytest

from inference_support.toy_model import ToyModel, expected_tokens
from pcomm.core.errors import ClosedError
from pcomm.core.process import signals as interrupts
from pcomm.inference.engine import engine as engine_module
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.sampling.params import SamplingParams

# Of so few tokens that drafts are tried, of which some are wrong.
MODEL = ToyModel(3)
PROMPTS = {"a": (0, 1, 0, 1, 0), "b": (0, 1, 0, 1, 0, 2, 2)}
LENGTH = 5


def engine_for():
    return Engine(
        MODEL,
        vocabulary=3,
        max_model_len=16,
        block_size=2,
        # Too few for both, so that one is preempted.
        num_blocks=9,
        num_state_slots=4,
        max_batch_tokens=6,
        speculative_tokens=2,
    )


def requests():
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    return [Request(name, prompt, params) for name, prompt in PROMPTS.items()]


# Between the end of a step and its return Python looks for no signal.
SOURCE, FIRST = inspect.getsourcelines(Engine.step)
RETURN = FIRST + len(SOURCE) - 1


@cache
def is_watched(path):
    return any(f"/pcomm/inference/{room}/" in path for room in ("engine", "sampling"))


class Lines:
    """Counts the lines of the engine that run, and interrupts at one of them.

    Args:
        wanted: The line and the number of times that it runs before; None for no interrupt.
    """

    def __init__(self, wanted=None):
        self.wanted, self.seen, self.is_interrupted = wanted, Counter(), False

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not self.has(frame):
            return None
        if event == "line":
            place = (code.co_filename, code.co_qualname, frame.f_lineno)
            self.at(place)
            self.seen[place] += 1
        return self

    def has(self, frame):
        return is_watched(frame.f_code.co_filename)

    def at(self, place):
        if (place, self.seen[place]) == self.wanted:
            self.is_interrupted = True
            sys.settrace(None)
            raise KeyboardInterrupt

    def watch(self, call):
        sys.settrace(None if self.is_interrupted else self)
        try:
            return call()
        finally:
            sys.settrace(None)


class CtrlC(Lines):
    """Sends SIGINT at each line, when it runs for the first time; once in a call."""

    def __init__(self):
        super().__init__()
        self.seen[engine_module.__file__, "Engine.step", RETURN] = 1

    def has(self, frame):
        if frame.f_code.co_filename == contextlib.__file__:
            # What enters and leaves the deferral.
            frame = frame.f_back
            return frame.f_code.co_filename == engine_module.__file__
        return super().has(frame) or frame.f_code.co_filename == interrupts.__file__

    def at(self, place):
        if not self.seen[place]:
            self.seen[place] += 1
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)


def run(lines):
    """Tokens of each request, and whether the engine refused to go on."""
    engine, found, is_refused = engine_for(), {name: [] for name in PROMPTS}, False
    try:
        for request in requests():
            try:
                lines.watch(lambda request=request: engine.add(request))
            except KeyboardInterrupt:
                engine.abort(request.request_id)
                engine.add(request)
        for _ in range(1000):
            if not engine.has_work:
                break
            try:
                outputs = lines.watch(engine.step)
            except KeyboardInterrupt:
                continue
            for output in outputs:
                found[output.request_id] += output.token_ids
            engine.stats()
        else:
            pytest.fail("the engine makes no progress")
    except ClosedError:
        is_refused = True
        with pytest.raises(ClosedError, match=r"\(\) was cut short"):
            engine.add(requests()[0])
    stats = engine.stats()
    assert is_refused or stats.blocks.used == stats.state_slots.used == 0
    engine.close()
    assert not engine.has_work
    stats = engine.stats()
    for pool in (stats.blocks, stats.state_slots):
        assert (pool.free, pool.used, pool.cached) == (pool.size, 0, 0)
    return found, is_refused


def test_a_ctrl_c_at_any_line_loses_nothing():
    wanted = {name: expected_tokens(MODEL, prompt, LENGTH) for name, prompt in PROMPTS.items()}
    ctrl_c, num_lines = CtrlC(), -1
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Until no new line is met: what follows an interrupt has lines of its own.
        while num_lines < (num_lines := len(ctrl_c.seen)):
            assert run(ctrl_c) == (wanted, False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    names = {name for _, name, _ in ctrl_c.seen}
    assert names > {"Engine.add", "Deferral.heard", "Scheduler.schedule", "OutputProcessor.advance"}
    assert num_lines > 200


def test_another_exception_at_any_line_gives_no_wrong_tokens():
    wanted = {name: expected_tokens(MODEL, prompt, LENGTH) for name, prompt in PROMPTS.items()}
    every = Lines()
    assert run(every) == (wanted, False)
    # Some of the lines, for time, in the middle.
    places = {(place, count // 2) for place, count in every.seen.items()}
    places = {(p, n) for p, n in places if p[1:] != ("Engine.step", RETURN)}
    met = Counter()
    for place in sorted(places)[::6]:
        lines = Lines(place)
        found, is_refused = run(lines)
        assert lines.is_interrupted, place
        met[is_refused] += 1
        for name, tokens in found.items():
            assert tokens == wanted[name][: len(tokens)], place
            assert is_refused or len(tokens) == LENGTH, place
    assert min(met[False], met[True]) > 10
