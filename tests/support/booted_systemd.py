"""A machine in namespaces whose first process is systemd: the root is this system's under an overlay in memory.

Nothing that happens there is seen outside: it has processes, mounts, a network and cgroups of its own, and writes to
the overlay. It needs root, overlayfs and cgroup v2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

import luce
from tests.support.daemons import within

Result = TypeVar("Result")

#: units of a whole system that would write to the kernel that both share, or wait for hardware
_MASKED = (
    *("systemd-sysctl.service", "systemd-modules-load.service", "systemd-remount-fs.service", "systemd-udevd.service"),
    *("systemd-udev-trigger.service", "systemd-update-utmp.service", "systemd-tmpfiles-setup-dev.service"),
    *("systemd-timesyncd.service", "systemd-networkd.service", "sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    *("sys-fs-fuse-connections.mount", "dev-hugepages.mount", "systemd-firstboot.service"),
    "tmp.mount",
)
_NAMESPACES = ("--pid", "--mount", "--net", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
# First the cgroup below which the machine's own are, so that what is left of them is found and removed.
_START = """
set -eu
mkdir "$1/cgroup"
mount -t cgroup2 cgroup2 "$1/cgroup"
mkdir "$1/cgroup/$2"
echo $$ > "$1/cgroup/$2/cgroup.procs"
umount "$1/cgroup"
exec unshare {namespaces} sh -c "$3" sh "$1"
""".format(namespaces=" ".join(_NAMESPACES))
_BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
rm -rf etc/systemd/system
mkdir -p etc/systemd/system srv opt
# A boot empties /tmp, where the checkout may be.
mkdir -p etc/tmpfiles.d
ln -sf /dev/null etc/tmpfiles.d/tmp.conf
for unit in {masked}; do ln -s /dev/null etc/systemd/system/$unit; done
# Credentials are mounted in a namespace of their own and reach the service by propagation.
mount --make-rshared .
exec env -i container=luce PATH="$PATH" chroot . "$(command -v systemd || echo /lib/systemd/systemd)" \\
    --system --unit=basic.target --show-status=no --log-target=journal
""".format(masked=" ".join(_MASKED))
_REMOVE_CGROUPS = 'mount -t cgroup2 cgroup2 "$1" && find "$1/$2" -depth -type d -exec rmdir {} +'


class Machine:
    """A booted systemd. `root` is its file system, seen from outside."""

    def __init__(self, pid: int) -> None:
        """pid: that of systemd, outside."""
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def run(self, *command: str, check: bool = True) -> str:
        """What a command inside writes, both streams."""
        line = ["nsenter", "-t", str(self.pid), "--all", f"--root={self.root}", f"--wd={self.root}", *command]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}"
        return done.stdout

    def start_in_network(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function on a thread of its own, whose sockets are in the machine's network."""

        def enter() -> None:
            with open(f"/proc/{self.pid}/ns/net") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), "setns")

        pool = ThreadPoolExecutor(1, initializer=enter)
        future = pool.submit(function)
        # The thread ends behind its only call.
        pool.shutdown(wait=False)
        return future

    def install_luce(self) -> None:
        """Put this environment where a service may read it, as /opt/luce.

        Its interpreter and its packages may lie below a home directory, which services do not see."""
        base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
        folder = self.root / "opt/luce"
        packages = folder / "lib" / version / "site-packages"
        for path in (packages, folder / "bin", self.root / "opt/python"):
            path.mkdir(parents=True)
        self.run("mount", "--bind", str(base), "/opt/python")
        found = []
        # An editable installation may be found by a hook, not by a path.
        source = str(Path(luce.__file__).parents[1])
        inside = [path for path in (source, *sys.path) if path and (self.root / path.lstrip("/")).is_dir()]
        for number, entry in enumerate(dict.fromkeys(inside)):
            if Path(entry).is_relative_to(base):
                found.append("/opt/python" / Path(entry).relative_to(base))
                continue
            (self.root / f"opt/path{number}").mkdir()
            self.run("mount", "--bind", entry, f"/opt/path{number}")
            found.append(Path(f"/opt/path{number}"))
        (packages / "outside.pth").write_text("".join(f"{path}\n" for path in found))
        (folder / "pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")
        os.symlink(f"/opt/python/bin/{version}", folder / "bin/python")
        script = folder / "bin/luce"
        script.write_text("#!/opt/luce/bin/python\nimport sys\nfrom luce.cli.main import main\nsys.exit(main())\n")
        script.chmod(0o755)
        # A shared libpython is looked for where it was built.
        (self.root / "etc/ld.so.conf.d/python.conf").write_text("/opt/python/lib\n")
        self.run("ldconfig")


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Machine]:
    """A machine, until the block ends. Skips the test where none can be booted."""
    if os.geteuid() or not all(shutil.which(name) for name in ("unshare", "nsenter", "systemctl")):
        pytest.skip("no systemd can be booted here: needs root, util-linux and systemd")
    name, cgroups, log = f"luce-test-{os.getpid()}", folder / "cgroups", folder / "boot.log"
    mounts = folder / "machine"
    mounts.mkdir()
    cgroups.mkdir()
    with open(log, "w") as out:
        command = ["unshare", "--mount", "sh", "-c", _START, "sh", str(mounts), name, _BOOT]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        pid = _first_process(process)
        if pid is None:
            pytest.skip(f"no systemd can be booted here: {log.read_text().strip()}")
        machine = Machine(pid)
        _await_boot(machine)
        yield machine
    finally:
        # unshare is the parent of systemd and takes it along, and with it all processes of the machine.
        process.kill()
        process.wait()
        remove = ["unshare", "--mount", "sh", "-c", _REMOVE_CGROUPS, "sh", str(cgroups), name]
        within(30, lambda: subprocess.run(remove, capture_output=True, check=False).returncode == 0)


def _first_process(process: subprocess.Popen[bytes]) -> int | None:
    """The pid of systemd; None if the boot has failed."""
    while process.poll() is None:
        # Files of processes that end meanwhile are gone.
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text() == "systemd\n":
                return int(children[0])
        time.sleep(0.05)
    return None


def _await_boot(machine: Machine) -> None:
    def state() -> str:
        return machine.run("systemctl", "is-system-running", check=False).strip()

    assert within(60, lambda: state() in ("running", "degraded")), state()
    assert state() == "running", machine.run("systemctl", "--failed", "--no-pager")
