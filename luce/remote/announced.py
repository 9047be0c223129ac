"""Steps in a daemon between their announcement and the response, and when their work is done."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, fields

from luce.remote.messages import Announce
from luce.remote.service import Work
from luce.runtime.device import Event
from luce.runtime.step import MadeMasks, RowMasks, Step
from luce.shard.pipeline import Result
from luce.shard.saved_state import JoinedSavedState


@dataclass(frozen=True)
class Announced:
    """A step whose Forward follows."""

    message: Announce
    #: the step's work, if it is queued already and waits for its input
    work: Work | None = None
    #: why the step cannot run; the response to Forward
    problem: Exception | None = None


@dataclass(frozen=True)
class AnnouncedStep(Step):
    """A step on its way through the pipeline, with the message that announced it."""

    # Fields behind those with defaults need defaults.
    message: Announce | None = None
    #: when the input is ready
    input_ready: Event | None = None

    @classmethod
    def of(cls, message: Announce, input_ready: Event, masks: RowMasks | None = None) -> AnnouncedStep:
        """The step of a message, with the masks that came behind it."""
        values = {field.name: getattr(message.step, field.name) for field in fields(Step)}
        values["masks"] = None if masks is None else MadeMasks(masks)
        return cls(**values, message=message, input_ready=input_ready)


def announcement(step: Step) -> tuple[Announce, Event]:
    """The message that announced a step of the pipeline, and when its input is ready."""
    assert isinstance(step, AnnouncedStep) and step.message is not None and step.input_ready is not None
    return step.message, step.input_ready


class QueuedStep:
    """Done when the pipeline's threads have queued a step, and its work is done."""

    def __init__(self, ran: Future[Result]) -> None:
        self._ran = ran

    def done(self) -> bool:
        return self._ran.done() and self._ran.result()[1].done()

    def wait(self) -> None:
        self._ran.result()[1].wait()


class CopiedState:
    """Done when the copies of a saved state are complete."""

    def __init__(self, saved: JoinedSavedState) -> None:
        self._saved = saved

    def done(self) -> bool:
        return self._saved.ready()

    def wait(self) -> None:
        self._saved.wait()
