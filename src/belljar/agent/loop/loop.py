"""The agent: hears the host, does what it asks, answers. What an order means to the guest is guest.py's and payload.py's.

THE HOT PATH. A guest under emulation that was resumed from a template runs every instruction for the first time, and
that is what costs: not loops, but each new piece of Python, libc and kernel. So on the way from a greeting to the
payload's first instruction nothing is imported, parsed, forked or created that could have been before (see `settle`).
"""

from __future__ import annotations

import _signal as signal
import os
import select
import sys
from contextlib import suppress

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import Refused, kernel_events, kill_quietly, next_stamp, read_file, say, shown, stamp
from belljar.agent.loop.channel import Channel, Usage
from belljar.agent.loop.connection import Connection
from belljar.agent.loop.hold import Holder, install_hold, spent
from belljar.agent.loop.payload import Job, Zygote, place, three_pipes
from belljar.agent.loop.process import Errand, Process, look_at_the_clock
from belljar.agent.wire import CALL, GREETING, HEIR, OF_PROCESS, PING, PONG, PORT, REPLY, WireError, Words, welcome


class Agent(Channel):
    """One thread, one epoll: the channel, the children, their pipes."""

    def __init__(self, fd: int, guest: Guest, *, is_port: bool) -> None:
        super().__init__(fd, is_port)
        self.guest = guest
        self.holder: Holder | None = None  # of a preparation
        self.processes: dict[int, Process | Connection] = {}
        self.dying: list[Process | Connection] = []
        self.ending: list[int] = []
        self.errands: list[Errand] = []
        self.zygote: Zygote | None = None
        self.calls = guest.calls | {
            b"add_account": lambda words: guest.add_account(Account(words)), b"place": self._place,
            b"settle": self._settle, b"hold_still": self._hold_still, b"go_on": lambda words: self.go_on(),
        }  # fmt: skip
        self.numbered = {  # these answer by themselves
            b"start": self._start, b"connect": self._connect, b"take_up": self._take_up,
            b"end_payload": self._end_payload,
        }  # fmt: skip
        self.began, self.has_put = 0, False
        self._catch_signals()

    def _catch_signals(self) -> None:
        """Payloads begin with every signal at its default: a handler, unlike SIG_IGN, is not inherited by execve."""
        for number in range(1, signal.NSIG):
            if number in (signal.SIGKILL, signal.SIGSTOP) or 32 <= number < signal.SIGRTMIN:
                continue
            quiet = number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM)
            signal.signal(number, (lambda number, stack: None) if quiet else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.wake, wake_inner = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_inner, False)
        signal.set_wakeup_fd(wake_inner)
        self.watch(self.wake, select.EPOLLIN, self._reap)

    def run(self) -> None:
        while not self.is_over:
            self.look()
            while self.later:
                self.later.pop(0)()

    # -- hearing

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == CALL:
            self._call(number, body)
        elif kind == PING:
            self.send(PONG, number, body)
        elif kind == GREETING:
            if not self.is_still:
                self._end_conversation(is_forked=body.startswith(HEIR))
                self.began, self.has_put = 0, False
            self.out = [welcome(body)]
            self.out_size = len(self.out[0])
        else:
            process = self.processes.get(number if kind in OF_PROCESS else number >> 2)
            if process is not None:  # else the frame crossed its end on the way
                process.take(kind, number, body)

    def _call(self, number: int, body: bytes) -> None:
        words = Words.of_call(body)
        name = words.next()
        try:
            if not 0 < number < 1 << 30:
                raise WireError(f"call number {number}")
            if name in self.numbered:
                return self.numbered[name](number, words)
            if name not in self.calls:
                raise Refused("bad-call", f"no call is named {shown(name)}")
            match self.calls[name](words):
                case (_, _) as long_call:
                    Errand(self, self.errands, number, name, long_call)
                case answer:
                    self.send(REPLY, number, answer or b"")
        except WireError:
            raise
        except Refused as exc:
            self.refuse(number, exc.kind, exc.message)
        except OSError as exc:
            what = os.fsencode(exc.filename) if exc.filename else name
            self.refuse(number, "refused", f"{shown(what)}: {exc.strerror or exc}")
        except Exception as exc:
            self.refuse(number, "bad-call", f"{shown(name)}: {type(exc).__name__}: {exc}")

    def _place(self, words: Words) -> None:
        files = words.rows(4)
        account = Account(words)
        self.guest.add_account(account)
        place(files, account, self.guest)

    def _check_new(self, number: int) -> None:
        if number in self.processes:
            raise WireError(f"process {number} is there already")

    def _connect(self, number: int, words: Words) -> None:
        self._check_new(number)
        self.processes[number] = Connection(self, number, words.number(), self._gone)
        self.send(REPLY, number)

    def _start(self, number: int, words: Words) -> None:
        self._check_new(number)
        files = words.rows(4)
        script, text = words.next(), words.next()
        words.words, words.at = words.words[words.at :], 0
        job = Job(words)
        self.guest.add_account(job.account)
        place(files, job.account, self.guest)
        self.guest.make_place(job.cwd, job.account)
        if script:
            name = os.path.basename(script.rstrip(b"/"))
            job.path = self.guest.new_folder(job.account) + b"/" + (b"script" if name in (b"", b".", b"..") else name)
            place([[job.path, b"%d" % 0o700, b"u", b"f" + text]], job.account, self.guest)
        if not job.builtin and not self.began:
            self.began = next_stamp() if self.has_put else stamp()
        self.has_put = self.has_put or job.builtin == b"put"
        job.began = self.began
        zygote: Zygote | None = None
        held = None if job.builtin or self.holder is None else self.holder.take(job)
        if held is None and not job.terminal and not job.builtin:
            zygote, self.zygote = self.zygote, None
        process = self.processes[number] = Process(self, self.guest, number, job, held or zygote, self._gone)
        if held is not None:
            process.before = spent(held.pid)
        try:
            if job.prepares:
                self.holder = Holder(self, self.guest.hold_socket, process)
            process.launch()
        except BaseException:
            process.drop_flows()
            process.close()
            raise
        self.send(REPLY, number)

    def _hold_still(self, words: Words) -> None:
        """The guest is about to be frozen. What runs outlives this conversation: it waits for one that goes on, or takes it up."""
        if self.errands or self.ending:
            raise Refused("busy", "the guest still does what it was asked before")
        self.hold_still()

    def _take_up(self, number: int, words: Words) -> None:
        """This conversation carries on with a process that another one held; what else there was is cut off."""
        process = self.processes.get(number)
        if not self.is_still or process is None or not process.pid:
            raise Refused("refused", f"nothing that is held has the number {number}")
        del self.processes[number]
        self._abandon_all()
        self.processes[number] = process
        self.go_on()
        self.later.append(process.take_up)
        self.send(REPLY, number)

    def _end_payload(self, number: int, words: Words) -> None:
        self.ending.append(number)
        self._abandon_all()
        self._check_ending()

    def _settle(self, words: Words) -> bytes:
        """Become what a template is made of: nothing runs, nothing is open, everything was done once."""
        import gc

        if self.holder is not None:
            self.holder.close()
        for process in [process for process in self.processes.values() if process.stays]:
            del self.processes[process.number]
        self._abandon_all()
        self.guest.warm(self._fork_ahead)
        gc.collect()
        gc.freeze()
        os.sync()
        self._reap(0)  # else each clone would begin with it
        self.parser.forget()
        # The kernel still has work of its own to do (groups removed, a child that ended). Left undone it would be every
        # clone's first act: 20 of the 55 ms from its start to our answer.
        select.select([], [], [], self.guest.quiet)
        return self.guest.growth()

    def _fork_ahead(self) -> None:
        self.zygote = self.zygote or Zygote(self.guest, self.guest.box(), *three_pipes())
        self.children[self.zygote.pid] = self._forget_zygote

    def _forget_zygote(self, status: int, usage: Usage) -> None:
        zygote, self.zygote = self.zygote, None
        if zygote is not None:
            zygote.discard()

    # -- endings

    def _reap(self, events: int) -> None:
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)
        with suppress(ChildProcessError):
            while (child := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = child
                if ended := self.children.pop(pid, None):
                    ended(status, (usage.ru_utime, usage.ru_stime, usage.ru_maxrss << 10))
        if self.on_child is not None:
            self.on_child()
        look_at_the_clock(self.errands)

    def _gone(self, process: Process | Connection) -> None:
        if self.processes.get(process.number) is process:
            del self.processes[process.number]
        if process in self.dying:
            self.dying.remove(process)
        self._check_ending()

    def _abandon_all(self) -> None:
        for process in list(self.processes.values()):
            del self.processes[process.number]
            self.dying.append(process)
            process.abandon()

    def _check_ending(self) -> None:
        if self.ending and not self.processes and not self.dying:
            ending, self.ending = self.ending, []
            self.guest.release()
            for number in ending:
                self.send(REPLY, number)

    def _end_conversation(self, *, is_forked: bool = False) -> None:
        if self.is_still:
            return  # the next one takes up what runs
        self.ending = []
        for errand in list(self.errands):
            errand.abandon()
        if is_forked:
            left, self.processes = self.processes, {}
            for process in left.values():
                process.leave()
        self._abandon_all()


def find_port(name: str) -> str:
    """The device of our virtio-serial port, as soon as its driver has it. No udev is needed."""
    folder, events = "/sys/class/virtio-ports", kernel_events()
    while True:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            is_ours = read_file(f"{folder}/{entry}/name", 256).strip() == name.encode("ascii")
            if is_ours and os.path.exists("/dev/" + entry):
                return "/dev/" + entry
        events.recv(8192)


def serve(fd: int, guest: Guest, is_port: bool) -> None:
    """Until the channel is gone for good; then nothing of a payload is left."""
    agent = Agent(fd, guest, is_port=is_port)
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    guest.release()


def main(argv: list[str]) -> int:
    if argv:
        say("usage: agent.pyc")
        return 2
    guest = Guest()
    guest.prepare()
    install_hold()
    serve(os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC), guest, is_port=True)
    return 1  # a guest's agent is started again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
