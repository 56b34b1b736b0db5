# mypy: ignore-errors
"""Run as a guest: tries what a hostile task would, each for real, and prints a JSON object: attempt → how it failed; ``ESCAPED``
at the beginning of one that has not. Needs nothing but Python. Facts about its surroundings are in its environment."""

import ctypes
import errno
import fcntl
import json
import os
import pty
import resource
import signal
import socket
import stat
import subprocess
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
AGENT, LAUNCHER, VICTIM = (int(os.environ[name]) for name in ("AGENT", "LAUNCHER", "VICTIM"))
STATE, SOCKETS, SOCKET, SPOOL, MEMBER = (os.environ[name] for name in ("STATE", "SOCKETS", "SOCKET", "SPOOL", "MEMBER"))
PRIVILEGED = os.environ["PRIVILEGED"]
TRIES = {}


def attempt(work):
    """Note it by its name."""
    TRIES[work.__name__] = work
    return work


def made(result, what):
    """Of one that gives a descriptor."""
    if result >= 0:
        os.close(result)
    return call(result, what)


def call(result, what):
    """Of a function of the C library."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return f"ESCAPED: {what}"


@attempt
def list_the_state_of_the_agent():
    return f"ESCAPED: {os.listdir(STATE)}"


@attempt
def read_the_keys_of_the_cluster():
    return f"ESCAPED: {[open(os.path.join(MEMBER, name), 'rb').read() for name in os.listdir(MEMBER)]}"


@attempt
def read_the_output_of_another_task():
    return f"ESCAPED: {open(SPOOL, 'rb').read()}"


@attempt
def read_the_output_of_another_task_by_its_process():
    return f"ESCAPED: {open(f'/proc/{VICTIM}/fd/1', 'rb').read()}"


@attempt
def read_its_own_output():
    return f"ESCAPED: {open('/proc/self/fd/1', 'rb').read()}"


@attempt
def remove_its_own_output():
    os.unlink(os.readlink("/proc/self/fd/1"))
    return "ESCAPED"


@attempt
def put_a_link_in_place_of_its_output():
    os.symlink("/etc/passwd", os.readlink("/proc/self/fd/1") + ".new")
    return "ESCAPED"


@attempt
def put_a_pipe_in_place_of_its_output():
    os.mkfifo(os.readlink("/proc/self/fd/1") + ".new")
    return "ESCAPED"


@attempt
def hard_link_its_output():
    os.link("/proc/self/fd/1", "/tmp/kept", follow_symlinks=True)
    return "ESCAPED"


@attempt
def give_others_its_output():
    os.fchmod(1, 0o777)
    return "ESCAPED"


def _trace(pid):
    return call(LIBC.ptrace(16, pid, None, None), "attached")


@attempt
def trace_the_agent():
    return _trace(AGENT)


@attempt
def trace_the_launcher():
    return _trace(LAUNCHER)


@attempt
def trace_another_task():
    return _trace(VICTIM)


def _kill(pid):
    os.kill(pid, signal.SIGTERM)
    return "ESCAPED"


@attempt
def kill_the_agent():
    return _kill(AGENT)


@attempt
def kill_the_launcher():
    return _kill(LAUNCHER)


@attempt
def kill_another_task():
    return _kill(VICTIM)


def _connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
    return "ESCAPED: connected"


@attempt
def ask_the_agent():
    return _connect(SOCKET)


@attempt
def ask_the_launcher():
    return _connect(SOCKETS + "/launcher.sock")


@attempt
def become_root():
    os.setresuid(0, 0, 0)
    return "ESCAPED"


@attempt
def become_another_user():
    os.setresuid(20004, 20004, 20004)
    return "ESCAPED"


@attempt
def take_the_group_of_root():
    os.setgroups([0])
    return "ESCAPED"


@attempt
def take_capabilities():
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    every = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    return call(LIBC.capset(header, every), "capset")


@attempt
def take_an_ambient_capability():
    return call(LIBC.prctl(47, 2, 21, 0, 0), "ambient")


@attempt
def run_a_set_user_id_program():
    said = subprocess.run([PRIVILEGED], capture_output=True, text=True, check=False).stdout
    return f"ESCAPED: {said}" if "root" in said else said


@attempt
def leave_its_cgroup():
    tried = []
    for line in open("/proc/self/cgroup", encoding="ascii"):
        _, controllers, _ = line.strip().split(":", 2)
        for mount in open("/proc/self/mounts", encoding="utf-8"):
            _, place, kind, *_ = mount.split()
            if kind.startswith("cgroup") and (not controllers or controllers.split(",")[0] in place):
                try:
                    with open(place + "/cgroup.procs", "w", encoding="ascii") as file:
                        file.write("0")
                except OSError as error:
                    tried.append(error.errno)
                else:
                    return f"ESCAPED: {place}"
    return f"refused {len(tried)} times" if tried else "ESCAPED: nothing was tried"


@attempt
def change_a_limit_of_its_cgroup():
    refused = 0
    for line in open("/proc/self/cgroup", encoding="ascii"):
        _, controllers, path = line.strip().split(":", 2)
        for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup", f"/sys/fs/cgroup/{controllers}"):
            for name in ("cgroup.freeze", "pids.max", "memory.max", "memory.limit_in_bytes", "cgroup.kill"):
                try:
                    with open(f"{base}{path}/{name}", "w", encoding="ascii") as file:
                        file.write("1")
                except OSError:
                    refused += 1
                else:
                    return f"ESCAPED: {base}{path}/{name}"
    return f"refused {refused} times"


@attempt
def raise_its_limits():
    for which in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return "ESCAPED"


@attempt
def look_through_the_root_of_another_process():
    return f"ESCAPED: {os.listdir('/proc/1/root')}"


@attempt
def read_the_environment_of_the_agent():
    return f"ESCAPED: {open(f'/proc/{AGENT}/environ', 'rb').read()[:20]}"


@attempt
def read_the_memory_of_the_launcher():
    return f"ESCAPED: {open(f'/proc/{LAUNCHER}/mem', 'rb')}"


@attempt
def see_other_processes():
    seen = [pid for pid in (AGENT, LAUNCHER, VICTIM) if os.path.exists(f"/proc/{pid}")]
    return f"ESCAPED: {seen}" if seen else "none is to be seen"


@attempt
def change_its_root():
    os.chroot("/tmp")
    return "ESCAPED"


@attempt
def mount_something():
    return call(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None), "mounted")


@attempt
def unmount_what_hides():
    return call(LIBC.umount2(b"/home", 2), "unmounted")


@attempt
def have_a_user_namespace():
    return call(LIBC.unshare(0x10000000), "unshared")


@attempt
def clone_a_user_namespace():
    result = LIBC.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    return call(result, "cloned")


@attempt
def open_a_raw_socket():
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "ESCAPED"


@attempt
def open_a_packet_socket():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return "ESCAPED"


@attempt
def read_the_memory_of_the_machine():
    for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"):
        try:
            open(path, "rb").close()
        except OSError as error:
            found = error.errno
        else:
            return f"ESCAPED: {path}"
    return errno.errorcode[found]


@attempt
def make_a_device():
    os.mknod("/tmp/mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1))
    return "ESCAPED"


@attempt
def open_a_disk():
    disks = [name for name in os.listdir("/dev") if stat.S_ISBLK(os.stat(f"/dev/{name}").st_mode)]
    for name in disks:
        try:
            os.close(os.open(f"/dev/{name}", os.O_RDONLY))
        except OSError:
            continue
        return f"ESCAPED: {name}"
    return f"none of {len(disks)}"


@attempt
def type_into_a_terminal():
    sides = pty.openpty()
    try:
        fcntl.ioctl(sides[1], 0x5412, b"x")
    finally:
        for side in sides:
            os.close(side)
    return "ESCAPED"


@attempt
def use_the_keys_of_the_session():
    return call(LIBC.syscall(250 if os.uname().machine == "x86_64" else 219, 0, -3, 1), "keyring")


@attempt
def load_a_program_into_the_kernel():
    return call(LIBC.syscall(321 if os.uname().machine == "x86_64" else 280, 0, 0, 0), "bpf")


@attempt
def change_its_segments():
    if os.uname().machine != "x86_64":
        return "there are none"
    return call(LIBC.syscall(154, 0, ctypes.create_string_buffer(16), 16), "modify_ldt")


@attempt
def watch_its_own_faults():
    return made(LIBC.syscall(323 if os.uname().machine == "x86_64" else 282, 1), "userfaultfd")


@attempt
def have_a_ring_of_requests():
    return made(LIBC.syscall(425, 8, ctypes.create_string_buffer(256)), "io_uring")


@attempt
def open_a_file_by_its_handle():
    return made(LIBC.syscall(304 if os.uname().machine == "x86_64" else 265, -100, 0, 0), "handle")


@attempt
def give_a_command_to_a_console():
    sides = pty.openpty()
    try:
        fcntl.ioctl(sides[1], 0x541C, b"\3")
    finally:
        for side in sides:
            os.close(side)
    return "ESCAPED"


@attempt
def set_where_cores_go():
    open("/proc/sys/kernel/core_pattern", "w", encoding="ascii").close()
    return "ESCAPED"


@attempt
def write_to_the_machine():
    for path in ("/", "/etc", "/usr/bin", "/var/lib", "/run", "/run/lock", "/opt", "/srv", "/mnt"):
        try:
            os.close(os.open(f"{path}/{os.environ['LEFT']}", os.O_CREAT | os.O_WRONLY))
        except OSError:
            continue
        return f"ESCAPED: {path}"
    return "nowhere"


@attempt
def read_homes():
    for path in (os.environ["ANOTHERS_HOME"], "/root"):
        try:
            return f"ESCAPED: {os.listdir(path)}"
        except OSError:
            continue
    return "none is to be seen"


@attempt
def list_homes():
    return f"ESCAPED: {os.listdir('/home')}"


@attempt
def find_a_variable_of_the_agent():
    found = [
        name for name in os.environ if name in ("LD_PRELOAD", "PEERLOAD_CLUSTER", "PEERLOAD_LAUNCHER", "XDG_STATE_HOME")
    ]
    return f"ESCAPED: {found}" if found else "none"


@attempt
def find_an_open_descriptor():
    # What a task is given has no FD_CLOEXEC, so a child has it too; what libraries of this process have opened, it has not.
    lines = ["sh", "-c", "for fd in /proc/$$/fd/*; do readlink $fd; done"]
    found = subprocess.run(lines, close_fds=False, capture_output=True, text=True, check=False).stdout.splitlines()
    more = [path for path in found if not path.startswith(("pipe:", "/dev/null"))]
    return f"ESCAPED: {more}" if more or len(found) > 3 else "none"


@attempt
def fill_the_disk():
    size = 0
    try:
        with open("/tmp/filler", "wb", buffering=0) as file:
            while size < 64 << 20:
                size += file.write(b"x" * (1 << 20))
    finally:
        os.unlink("/tmp/filler")
    return f"ESCAPED: {size} bytes"


@attempt
def fork_without_end():
    made = []
    try:
        while len(made) < 400:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            made.append(pid)
    except BlockingIOError:
        return f"after {len(made)}"
    finally:
        for pid in made:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return f"ESCAPED: {len(made)} processes"


def main():
    told = {}
    for name, work in TRIES.items():
        try:
            told[name] = str(work())
        except OSError as error:
            told[name] = errno.errorcode.get(error.errno, str(error.errno))
        except ValueError as error:
            told[name] = str(error)
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        with open(f"{path}/{os.environ['LEFT']}", "w", encoding="ascii") as file:
            file.write("left")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        os._exit(0)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
