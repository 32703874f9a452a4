"""Work started on one stream and awaited by another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hydragraph.cluster.message_in_flight import Message
from hydragraph.ir.instruction import Stream
from hydragraph.runtime.streams import DeviceStreams, Mark


@dataclass(frozen=True, eq=False)
class Finish:
    """Function that ends an exchange, called once on the stream that started it.

    Attributes:
        then: starts a second exchange, which completes the value.
    """

    result: Callable[[], Tensor]
    message: Message | None = None
    then: Callable[[], Finish] | None = None

    def __call__(self) -> Tensor:
        value = self.result()
        return value if self.then is None else self.then()()

    @property
    def ready(self) -> bool:
        return self.message is None or self.message.done


class Pending:
    """Value whose exchange ends on one stream while another stream waits.

    Args:
        at_once: whether to queue the exchange's end right after its start, if the device queues waits. Pass False if
            the wait would delay later work.
    """

    def __init__(self, streams: DeviceStreams, stream: Stream, finish: Finish, at_once: bool = True) -> None:
        self._streams = streams
        self._stream = stream
        self._finish = finish
        self._end: tuple[Tensor, Mark] | None = None
        if streams.queued and at_once:
            self.end()

    @property
    def ready(self) -> bool:
        return self._end is not None or (self._finish.ready and self._finish.then is None)

    @property
    def follows(self) -> bool:
        return self._end is None and self._finish.then is not None

    @property
    def arrived(self) -> bool:
        return self._end is not None or self._finish.ready

    def go_on(self) -> None:
        """Wait for the current exchange, and start the second."""
        assert self._finish.then is not None, "no exchange follows"
        with self._streams.on(self._stream):
            self._finish.result()
            self._finish = self._finish.then()

    def __call__(self) -> Tensor:
        """Make the current stream wait for the value, and return it; its memory stays while used."""
        value, mark = self.end()
        self._streams.wait(mark)
        self._streams.hold(value)
        return value

    def end(self) -> tuple[Tensor, Mark]:
        """End the exchange on its stream; the current stream does not wait."""
        if self._end is None:
            with self._streams.on(self._stream):
                self._end = self._finish(), self._streams.mark()
        return self._end
