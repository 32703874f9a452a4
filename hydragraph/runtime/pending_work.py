"""What one stream has begun and another waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hydragraph.cluster.message_in_flight import Message
from hydragraph.ir.instruction import Stream
from hydragraph.runtime.streams import DeviceStreams, Mark


@dataclass(frozen=True, eq=False)
class Finish:
    """The end of an exchange: called once, on the stream that began it, it waits for its message and gives the result.

    Attributes:
        result: called once, after which the value is there: waits for the message and returns the tensor.
        message: what it waits for; None where it has nothing to wait for.
        then: begins the exchange that goes on with the result, which is complete at the end of that one; None: it is
            complete.
    """

    result: Callable[[], Tensor]
    message: Message | None = None
    then: Callable[[], Finish] | None = None

    def __call__(self) -> Tensor:
        value = self.result()
        return value if self.then is None else self.then()()

    @property
    def ready(self) -> bool:
        """Whether calling it would not hold up the host."""
        return self.message is None or self.message.done


class Pending:
    """A value on its way: ended on its own stream, then waited for by the stream that asks for it.

    Where waiting is queued, it is ended as soon as it has begun: nothing holds the host up, and nothing that comes
    later on its stream needs to come before.

    Args:
        streams: the device's queues.
        stream: the one on which it is ended.
        finish: what ends it, and gives the value.
        at_once: False where its end would hold up what comes later on its stream: it then ends when it is asked for.
    """

    def __init__(self, streams: DeviceStreams, stream: Stream, finish: Finish, at_once: bool = True) -> None:
        self._streams = streams
        self._stream = stream
        self._finish = finish
        self._end: tuple[Tensor, Mark] | None = None
        if streams.queued and at_once:
            self._ended()

    @property
    def ready(self) -> bool:
        """Whether asking for it would not hold up the host."""
        return self._end is not None or (self._finish.ready and self._finish.then is None)

    @property
    def follows(self) -> bool:
        """Whether an exchange is to begin yet, behind the one under way."""
        return self._end is None and self._finish.then is not None

    @property
    def arrived(self) -> bool:
        """Whether the exchange under way is over."""
        return self._end is not None or self._finish.ready

    def go_on(self) -> None:
        """Wait for the exchange under way, and begin the one that follows."""
        assert self._finish.then is not None, "nothing follows"
        with self._streams.on(self._stream):
            self._finish.result()
            self._finish = self._finish.then()

    def end(self) -> None:
        """Wait until it is there, on its own stream; whoever asks for it later need not."""
        self._ended()

    def __call__(self) -> Tensor:
        """Let the current stream wait; return the value, whose memory then outlives what this stream does with it."""
        value, mark = self._ended()
        self._streams.wait(mark)
        self._streams.hold(value)
        return value

    def _ended(self) -> tuple[Tensor, Mark]:
        if self._end is None:
            with self._streams.on(self._stream):
                self._end = self._finish(), self._streams.mark()
        return self._end
