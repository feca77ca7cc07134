"""`pccl run`: what its ranks get, what it prints, and how it ends."""

import fcntl
import io
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
from functools import partial

import pytest
from programs import launch
from workers import command, eventually, masters

import pccl
from pccl import _core, master, process
from pccl.master import make_secret
from pccl.tools import run as run_tool
from pccl.tools import screen

ENDLESS = {"PCCL_DRAIN_SECONDS": "100000"}


def start(program, *options, ranks=2, **extra):
    """`pccl run` of a program."""
    run = [sys.executable, "-m", "pccl", "run", "-n", str(ranks), *options, "--"]
    return subprocess.Popen(
        [*run, *command(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **extra,
    )


@pytest.fixture
def run(tmp_path):
    """Runs to the end; returns (status, lines of output, error text)."""

    def run(program, *options, ranks=2, **extra):
        process = start(program, *options, ranks=ranks, cwd=tmp_path, **extra)
        out, err = process.communicate(timeout=200)
        join, _, err = err.partition("\n")
        assert join.startswith("pccl run: to join: PCCL_MASTER=127.0.0.1:")
        return process.returncode, out.splitlines(), err

    return run


def wait_for_lines(process, count):
    return [process.stdout.readline() for _ in range(count)]


def test_every_rank_finds_the_master_and_its_own_number(run):
    status, lines, err = run(launch.print_settings, ranks=3)
    assert (status, err) == (0, "")
    assert len(lines) == 3
    masters = set()
    for rank, line in enumerate(sorted(lines)):
        prefix, peers, bind, own, master = line.split()
        assert (prefix, peers, bind, own) == (f"[{rank}]", "3", "127.0.0.1", str(rank))
        masters.add(master)
    (master,) = masters
    host, port = master.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


@pytest.mark.parametrize("given", [None, "7"])
def test_ranks_share_the_cores_unless_the_user_says_how_many_threads(run, given):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": given} if given else {}
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    status, lines, _ = run(launch.print_threads, env=env)
    assert status == 0
    assert sorted(lines) == [f"[{rank}] {given or share}" for rank in range(2)]


def test_the_master_listens_while_the_ranks_run(run):
    assert run(launch.connect_to_the_master)[0] == 0


def test_how_to_join_is_told_at_the_start_and_the_secret_only_when_asked(tmp_path):
    for options in ((), ("--show-join",)):
        process = start(launch.print_master_and_secret, *options, ranks=1, cwd=tmp_path)
        out, err = process.communicate(timeout=200)
        master, secret = out.removeprefix("[0] ").split()
        line = err.splitlines()[0]
        assert line.startswith(f"pccl run: to join: PCCL_MASTER={master} ")
        assert (secret in line) == bool(options)
        assert ("--show-join" in line) == (not options)


def test_another_process_joins_by_the_line_that_is_shown(tmp_path):
    process = start(launch.grow, "--show-join", ranks=1, cwd=tmp_path)
    line = process.stderr.readline().removeprefix("pccl run: to join: ")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=200)
    assert done.stdout == "together 2\n", done.stderr
    assert process.communicate(timeout=200)[0] == "[0] together 2\n"


def test_ranks_join_the_run_of_several_masters(tmp_path):
    secret = make_secret()
    with masters(2, PCCL_SECRET=secret) as run:
        env = os.environ | {"PCCL_SECRET": secret, "PCCL_MIN_PEERS": "2", "PCCL_BIND": "127.0.0.1"}
        env |= {"PCCL_MASTER": "example.org:1"}  # not that one
        process = start(launch.grow, "--join", run.address, env=env, cwd=tmp_path)
        out, err = process.communicate(timeout=200)
    assert sorted(out.splitlines()) == ["[0] together 2", "[1] together 2"], err
    assert "to join" not in err


def test_settings_that_only_one_process_can_have_are_not_passed_on(run):
    env = os.environ | {"PCCL_PORT": "5000", "PCCL_ADVERTISE": "example.org:5000"}
    assert sorted(run(launch.print_whether_one_process_settings, env=env)[1]) == [
        "[0] False",
        "[1] False",
    ]


def test_lines_stay_whole_and_in_order(run):
    status, lines, _ = run(launch.print_lines_in_two_parts)
    assert status == 0
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {i} {'x' * 50}{'y' * 50}" for i in range(2000)]


def test_the_last_line_needs_no_newline_and_a_long_one_arrives(run):
    status, lines, _ = run(launch.print_a_long_line, ranks=1)
    assert status == 0
    assert lines == ["[0] " + "z" * 300_000]


def test_errors_go_to_the_error_stream(run):
    status, lines, err = run(launch.print_an_error, ranks=1)
    assert (status, lines, err) == (0, [], "[0] oh\n")


def test_a_failing_rank_stops_the_others_and_gives_its_status(tmp_path):
    process = start(partial(launch.fail_or_sleep, failing=1), ranks=3, cwd=tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 7
    assert "rank 1 ended with exit status 7; stopping the others" in err


def test_a_killed_rank_gives_the_status_of_its_signal(run):
    status, _, err = run(launch.kill_itself, ranks=1)
    assert status == 128 + signal.SIGKILL
    assert "SIGKILL" in err


def test_an_elastic_run_goes_on_without_a_failed_rank(run):
    status, lines, err = run(partial(launch.fail_or_print, failing=0), "--elastic")
    assert (status, lines) == (0, ["[1] done"])
    assert "rank 0 ended with exit status 7" in err


def test_an_elastic_run_without_any_success_fails(run):
    assert run(launch.fail, "--elastic")[0] == 9


def test_an_elastic_run_that_lost_a_rank_before_its_start_ends(run):
    status, _, err = run(partial(launch.fail_or_join, failing=0), "--elastic")
    assert status == 7
    assert (
        "pccl run: the run cannot start: it waits for 2 peers, and no more than 1 can come; "
        "stopping the others" in err.splitlines()
    )


def test_pauses_before_restarts_have_a_limit():
    assert [run_tool._pause(count) for count in (0, 1, 2, 5, 5000)] == [1, 2, 4, 30, 30]


@pytest.mark.parametrize("options", [[], ["--elastic"]])
def test_a_rank_that_fails_is_started_again(run, tmp_path, options):
    folder = tmp_path / "lives"
    folder.mkdir()
    program = partial(launch.fail_twice, str(folder))
    status, lines, err = run(program, *options, "--restarts", "2")
    assert (status, sorted(lines)) == (0, ["[0] lives again, with 1", "[1] done"])
    failed = "pccl run: rank 0 ended with exit status 7; starting it again in"
    assert err.splitlines() == [f"{failed} 1 s (1 of 2)", f"{failed} 2 s (2 of 2)"]


def test_a_rank_that_fails_once_more_counts_as_failed(run, tmp_path):
    folder = tmp_path / "lives"
    folder.mkdir()
    status, _, err = run(partial(launch.fail_twice, str(folder)), "--restarts", "1")
    assert status == 7
    assert err.splitlines()[-1].startswith("pccl run: rank 0 ended with exit status 7")
    assert len(list(folder.iterdir())) == 2


def test_a_rank_that_was_started_again_takes_part(run, tmp_path):
    program = partial(launch.train_and_die, str(tmp_path))
    status, lines, _ = run(program, "--restarts", "1")
    assert (status, sorted(lines)) == (0, ["[0] saw 12", "[1] saw 12"])


def test_ranks_are_stopped_soon_though_they_have_no_admission_point(tmp_path):
    process = start(launch.train_until_one_fails, cwd=tmp_path, env=os.environ | ENDLESS)
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_run_that_is_told_to_end_leaves_at_admission_points(tmp_path):
    process = start(launch.train_without_end, cwd=tmp_path, env=os.environ | ENDLESS)
    assert sorted(wait_for_lines(process, 2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in err and "Error" not in err, err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(tmp_path, number, status):
    process = start(launch.sleep, cwd=tmp_path)
    assert sorted(wait_for_lines(process, 2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == status
    assert err.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)


def test_ranks_that_ignore_signals_are_killed_when_ctrl_c_is_repeated(tmp_path):
    process = start(launch.ignore_signals, ranks=1, cwd=tmp_path)
    assert wait_for_lines(process, 1) == ["[0] ready\n"]
    process.send_signal(signal.SIGINT)
    assert wait_for_lines(process, 1) == ["[0] SIGINT\n"]
    process.send_signal(signal.SIGINT)
    assert wait_for_lines(process, 1) == ["[0] SIGTERM\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode == 130


def test_what_a_rank_started_gets_the_signal_too(tmp_path):
    process = start(launch.start_a_sleeper, ranks=1, cwd=tmp_path)
    assert wait_for_lines(process, 1) == ["[0] ready\n"]
    process.send_signal(signal.SIGTERM)
    # The pipe ends only when the rank's child has ended, too.
    out, _ = process.communicate(timeout=200)
    assert (process.returncode, out) == (143, "")


def test_a_reader_that_leaves_ends_the_run(tmp_path):
    process = start(launch.print_for_ever, cwd=tmp_path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=200) == 128 + signal.SIGPIPE
    process.stderr.close()


def full(pipe):
    """Whether the next write to it waits."""
    waiting = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"1234"))[0]
    return waiting > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - resource.getpagesize()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_obeyed_while_the_reader_of_the_output_pauses(tmp_path, number, status):
    process = start(launch.print_for_ever, cwd=tmp_path)
    eventually(lambda: full(process.stdout))
    process.send_signal(number)
    assert process.wait(timeout=200) == status
    process.communicate()


def test_ranks_need_files_and_get_the_former_limit(tmp_path):
    low = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (24, 4096))
    process = start(partial(launch.wait_for_a_limit, 24), ranks=12, preexec_fn=low, cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out.count("it is")) == (0, 12), err


def test_a_limit_of_files_that_cannot_suffice_is_told_before_the_start(tmp_path):
    low = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (70, 70))
    process = start(launch.fail, ranks=30, preexec_fn=low, cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (2, "")
    assert "30 ranks need 214 open files here, and the limit is 70" in err


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        ("-um train", None),
        ("-Ibm train", None),
        ("-uc train", None),
        ("-mtrain x.py", None),
        ("-", None),
        ("-uX dev x.py y.py", "x.py"),
        ("-Xdev -uWignore x.py", "x.py"),
        ("--check-hash-based-pycs always x.py", "x.py"),
        ("-- x.py", "x.py"),
        ("-u x.py -m", "x.py"),
    ],
)
def test_the_script_of_python_is_found_behind_its_options(arguments, script):
    assert run_tool._script(arguments.split()) == script


def test_the_program_keeps_its_own_options_and_dashes(run, tmp_path):
    show = tmp_path / "show.py"
    show.write_text("import sys; print(sys.argv[1:])")
    words = [sys.executable, "-m", "pccl", "run", "-n", "1", "--"]
    done = subprocess.run(
        [*words, str(show), "-n", "5", "--", "--elastic"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.stdout == "[0] ['-n', '5', '--', '--elastic']\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "program", ["pccl master --insecure --listen", "pccl.master --listen-address"]
)
def test_a_master_says_where_it_listens_and_ends_at_a_signal(tmp_path, program, number):
    module, *options = program.split()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *options, "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout.readline().startswith("listening on 127.0.0.1:")
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_script_that_runs_a_master_stays_alive_until_a_signal(tmp_path):
    process = subprocess.Popen(
        command(launch.run_master),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    address = process.stdout.readline().strip()
    assert f"still master on {address}" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode == 0


def test_a_standard_error_that_cannot_be_written_ends_no_master(monkeypatch):
    class Served:
        address = "127.0.0.1:1"
        waited = False

        def wait(self):
            self.waited = True

    for stream in (None, open("/dev/full", "w"), io.StringIO()):  # noqa: SIM115
        if isinstance(stream, io.StringIO):
            stream.close()
        served = Served()
        with monkeypatch.context() as patch:
            patch.setattr(process, "masters", {served})
            patch.setattr(process, "peers", set())
            patch.setattr(sys, "stderr", stream)
            process._at_exit()
            screen.note("pccl", "it goes on")
        assert served.waited


def test_logs_and_progress_need_no_standard_error(tmp_path):
    path = tmp_path / "file"
    program = command(partial(launch.serve_in_place_of_stderr, str(path)))
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *program],
        env=os.environ | {"PCCL_LOG_LEVEL": "DEBUG", "PCCL_BIND": "127.0.0.1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "shared {'step': 1}\n")
    assert path.read_bytes() == b""


def test_a_secret_file_that_cannot_be_written_is_not_left_empty(tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(master, "make_secret", full)
    with pytest.raises(pccl.InvalidArgument, match="cannot make the secret's file .*No space"):
        master._secret_in(str(tmp_path / "secret"))
    assert list(tmp_path.iterdir()) == []


def test_a_master_without_a_default_route_names_an_address_of_an_interface(monkeypatch):
    def no_route(*arguments):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", no_route)
    found = ["fd00::2", "192.168.1.10", "127.0.0.1"]
    monkeypatch.setattr(_core, "interface_addresses", lambda: found)
    assert master._as_others_see("0.0.0.0:5000") == "192.168.1.10:5000"
    assert master._as_others_see("[::]:5000") == "[fd00::2]:5000"
    assert master._as_others_see("10.0.0.1:5000") == "10.0.0.1:5000"
    found[:2] = []
    assert master._as_others_see("0.0.0.0:5000") == f"{socket.gethostname()}:5000"
