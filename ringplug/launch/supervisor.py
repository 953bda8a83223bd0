"""Runs one job from its first rank to its last process: output, signals, failure, exit code."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ringplug.launch import failure
from ringplug.launch.job import Janitor, Job, die_with_parent
from ringplug.launch.output import Console, Stream, launcher_lines, open_streams

__all__ = ["Ended", "Supervisor"]

_TICK = 0.1
_FAILURE_GRACE = 5.0
"""Seconds in which the launcher may end a job that has failed before ringrun does it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        code: The launcher's exit code.
        failures: Failures of ranks, in no order.
        said: What the launcher itself wrote.
    """

    code: int
    failures: tuple[failure.Failure, ...]
    said: str


@dataclass
class Supervisor:
    """One run of one command line.

    Attributes:
        job: Where ranks leave their records; its janitor clears up in the end.
        ranks: Number of ranks that may run on this host.
        local: Whether all ranks do.
        console: Where output goes.
        verbose: Show what the launcher itself says even when ringrun says it better.
    """

    job: Job
    ranks: int
    local: bool
    console: Console
    verbose: bool = False
    _signals: list[int] = field(default_factory=list)
    _asked: int = 0
    _launcher_said: list[str] = field(default_factory=list)
    _failed_since: float | None = None

    def run(self, line: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the command line to its end and say who failed first; the exit code for ringrun.

        It is the first failing rank's, 128 + signal for one that a signal ended, else the
        launcher's. No process and no file of the job is left when this returns or raises, or
        when this process is killed.
        """
        return self._conclude(self.watch(line, environ))

    def watch(
        self,
        line: Sequence[str],
        environ: Mapping[str, str],
        collect: Callable[[], None] = lambda: None,
    ) -> Ended:
        """Run the command line to its end, clear up, and say nothing about the end.

        Args:
            line: The launcher's.
            environ: Its environment.
            collect: Called when all ranks have ended and the job's files are still there.
        """
        janitor = Janitor(self.job)
        handlers = {
            number: signal.signal(number, self._note)
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGUSR1,
                signal.SIGUSR2,
            )
        }
        terminals = {"stdout": sys.stdout.isatty(), "stderr": sys.stderr.isatty()}
        streams = open_streams(self.job.directory, range(self.ranks), terminals)
        try:
            code = self._supervise(line, environ, streams)
            failures = failure.load(self.job.directory)
            said = "\n".join(self._launcher_said)
            known = failure.started_by(self.job.directory)
            seen = failure.from_launcher(said, known)
            if seen is not None and seen.rank not in {one.rank for one in failures}:
                failures.append(seen)
            collect()
        finally:
            for stream in streams:
                stream.close()
            janitor.finish()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Ended(code, tuple(failures), said)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _supervise(
        self, line: Sequence[str], environ: Mapping[str, str], streams: Sequence[Stream]
    ) -> int:
        here = os.getpid()
        process = subprocess.Popen(
            list(line),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            # A session of its own: Ctrl-C reaches ringrun alone, which passes it on in order.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(here),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        own = [
            Stream(-1, "stdout", os.dup(process.stdout.fileno())),
            Stream(-1, "stderr", os.dup(process.stderr.fileno())),
        ]
        process.stdout.close()
        process.stderr.close()
        with selectors.DefaultSelector() as selector:
            for stream in (*own, *streams):
                os.set_blocking(stream.descriptor, False)
                selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            while process.poll() is None:
                self._pump(selector, _TICK)
                self._forward(process)
                self._check_failure(process)
            # Processes that ranks left behind might write for ever.
            self.job.kill()
            while self._pump(selector, 0.0):
                pass
        for stream in (*own, *streams):
            self._show(stream, stream.rest())
        self.console.flush()
        for stream in own:
            stream.close()
        return process.returncode

    def _pump(self, selector: selectors.BaseSelector, wait: float) -> bool:
        """Show what has come; whether anything has."""
        ready = selector.select(wait)
        for key, _ in ready:
            stream: Stream = key.data
            lines = stream.read()
            if lines is None:
                selector.unregister(stream.descriptor)
            else:
                self._show(stream, lines)
        if ready:
            self.console.flush()
        return bool(ready)

    def _show(self, stream: Stream, lines: Sequence[bytes]) -> None:
        for line in lines:
            if stream.rank >= 0:
                self.console.line(stream.rank, stream.stream, line)
                continue
            for rank, kind, text in launcher_lines(line, stream.stream):
                if rank < 0:
                    # Kept for its account of a failure, which MPICH writes on standard output.
                    self._launcher_said.append(text.decode(errors="replace"))
                    if not self.verbose:
                        continue
                self.console.line(rank, kind, text)

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        """Pass signals on to all ranks; the second request to end is an order."""
        while self._signals:
            number = self._signals.pop(0)
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._send(process, number)
            elif self._asked:
                self._note_line(f"second {signal.Signals(number).name}: ending all ranks now")
                self.job.kill()
                process.kill()
            else:
                self._asked = number
                self._note_line(
                    f"{signal.Signals(number).name}: passed on to all ranks; once more ends them"
                )
                self._send(process, number)

    def _send(self, process: subprocess.Popen[bytes], number: int) -> None:
        if not self.local:
            # The launcher alone reaches ranks on other hosts. Open MPI passes SIGUSR1 and SIGUSR2
            # on, and turns the others into the end of the job.
            process.send_signal(number)
            return
        reached = 0
        for pid, _ in failure.started_by(self.job.directory).values():
            try:
                os.kill(pid, number)
                reached += 1
            except ProcessLookupError:
                continue
        if not reached and number not in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(signal.SIGTERM)

    def _check_failure(self, process: subprocess.Popen[bytes]) -> None:
        """End a job that goes on although one of its ranks has failed."""
        if self._failed_since is None:
            if any(Path(self.job.directory).glob("failure.*")):
                self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since > _FAILURE_GRACE:
            self.job.kill()
            process.kill()

    def _note_line(self, text: str) -> None:
        self.console.line(-1, "stderr", f"ringrun: {text}".encode())
        self.console.flush()

    def _conclude(self, ended: Ended) -> int:
        """Say who failed first; the exit code."""
        code = 128 - ended.code if ended.code < 0 else ended.code
        cause = failure.first(ended.failures)
        if self._asked and (code != 0 or cause is not None):
            self._note_line(f"ended by {signal.Signals(self._asked).name}")
            return 128 + self._asked
        if cause is None:
            for text in () if self.verbose else ended.said.splitlines():
                self.console.line(-1, "stderr", text.encode())
            if code != 0:
                self._note_line(f"the launcher failed with exit code {code}")
            self.console.flush()
            return code
        others = [one for one in ended.failures if one is not cause]
        text = failure.report(cause, others, self.console.tail(cause.rank))
        self.console.line(-1, "stderr", text.rstrip("\n").encode())
        self.console.flush()
        return cause.code
