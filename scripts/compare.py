"""The measuring part of scripts/compare.

    compare.py host|device [--rounds N] [--sizes LIST] [--device NAME] [--gid-index N] OUT.json
    compare.py report OUT.json      merges target/compare-{host,device}.json and prints the tables

All programs of a size run one after another, again and again, in an order that turns from round to round: what the
machine does meanwhile hits all. Each is divided by the base that ran in the same round. The side that measures runs on
processor 0, the one that answers on processor 1.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time

MEASURING, ANSWERING = "0", "1"
EXAMPLES = "target/release/examples"
PEERS = "target/peers/release"
LIMIT = 60  # seconds for one program
numbers = itertools.count()
ports = itertools.count(19000 + os.getpid() % 500 * 20)


class Missing(Exception):
    """Why a program gave no figures."""


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


class Server:
    """A program that answers; killed at the end."""

    def __init__(self, command, port=None, environment=None):
        self.errors = open(os.path.join("target", f"compare-server-{os.getpid()}-{next(numbers)}.txt"), "w+")
        try:
            self.process = subprocess.Popen(
                ["timeout", "-k", "5", "900", *command], stdout=subprocess.DEVNULL, stderr=self.errors,
                env=os.environ | (environment or {}))
        except OSError as error:
            raise Missing(str(error)) from error
        deadline = time.monotonic() + 20
        while port and not listening(port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Missing(f"{command[0]} does not listen: {self.said()}")
            time.sleep(0.02)

    def said(self):
        self.errors.seek(0)
        return last_line(self.errors.read())

    def stop(self, patience=0.0):
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.errors.close()
        os.unlink(self.errors.name)


def listening(port):
    """Whether a TCP socket of this host listens there."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            if any(line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}") for line in lines.readlines()[1:]):
                return True
    return False


def output(command, environment=None):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
                              env=os.environ | (environment or {}))
    except FileNotFoundError as error:
        raise Missing(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Missing(f"{command[0]} took longer than {LIMIT} s") from error
    if done.returncode:
        raise Missing(f"{command[0]}: exit status {done.returncode}: {last_line(done.stderr or done.stdout)}")
    return done.stdout


def installed(program):
    if not any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.environ["PATH"].split(":") + ["."]):
        raise Missing(f"{program} is not installed")


def row_of_numbers(text, least):
    """The last line that is nothing but numbers, of which there are at least so many."""
    for line in reversed(text.splitlines()):
        try:
            numbers = [float(word) for word in line.replace(",", " ").split()]
        except ValueError:
            continue
        if len(numbers) >= least:
            return numbers
    raise Missing(f"output not understood: {last_line(text)}")


# Each measurement gives {"p50_ns": …, "min_ns": …} of a round trip, or {"per_s": …}.

class Ours:
    """The controller and coprocessor examples; the coprocessor serves one session after another."""

    def __init__(self, options):
        self.options = options
        self.port = next(ports)
        self.server = None

    def controller(self, *arguments):
        if self.server is None:
            self.server = Server([f"{EXAMPLES}/coprocessor", *self.options, "--cpu", ANSWERING, "-p", str(self.port)], self.port)
        text = output([f"{EXAMPLES}/controller", *self.options, "--cpu", MEASURING, "-p", str(self.port), "--json",
                       "--timeout-ms", "10000", *arguments])
        report = json.loads(text)
        if report["corrupt"] or not report["verified"]:
            raise Missing(f"{report['corrupt']} corrupt replies")
        return report

    def latency(self, size, rounds, warmup, block):
        report = self.controller("-s", str(size), "-n", str(rounds), "--warmup", str(warmup), "--block", str(block))
        return {"p50_ns": report["rtt_ns"]["p50"], "min_ns": report["rtt_ns"]["min"]}

    def messages(self, size, rounds, warmup):
        """Messages both ways per second, 64 rounds in flight."""
        report = self.controller("-s", str(size), "-n", str(rounds), "--warmup", str(warmup), "--depth", "64")
        return {"per_s": 2 * report["rounds_per_s"]}

    def stop(self):
        if self.server:
            self.server.__exit__()
            self.server = None


def floor(size, rounds, warmup, block):
    report = json.loads(output([f"{PEERS}/floor", *map(str, (size, rounds, warmup, block)), MEASURING, ANSWERING]))
    return {"p50_ns": report["p50_ns"], "min_ns": report["min_ns"]}


def iceoryx2(kind, size, rounds, warmup, block):
    if size == 0:
        raise Missing("has no empty payload")
    program = f"{PEERS}/iceoryx2_peer"
    installed(program)
    name = f"compare-{os.getpid()}-{next(ports)}"
    with Server([program, f"serve-{kind}", name, str(size), ANSWERING]):
        report = json.loads(output([program, kind, name, *map(str, (size, rounds, warmup, block)), MEASURING]))
    return {"p50_ns": report["p50_ns"], "min_ns": report["min_ns"]}


def ucx(test, transport, size, rounds, warmup):
    """One-way latency, doubled. Its least is not reported."""
    if size == 0:
        raise Missing("has no empty payload in this test")
    installed("ucx_perftest")
    port = next(ports)
    layout = ["-D", "short" if size <= 2048 or test == "put_lat" else "bcopy"]
    with Server(["ucx_perftest", "-c", ANSWERING, "-p", str(port)], port) as server:
        text = output(["ucx_perftest", "127.0.0.1", "-p", str(port), "-c", MEASURING, "-t", test, "-x", transport, "-d", "memory",
                       *layout, "-s", str(size), "-n", str(rounds), "-w", str(warmup), "-f", "-v"])
        server.stop(2)
    return {"p50_ns": 2000 * row_of_numbers(text, 7)[1], "min_ns": None}


def libfabric(size, rounds):
    """A mean, doubled: it reports nothing else, and has no warm-up."""
    if size == 0:
        raise Missing("has no empty payload")
    installed("fi_pingpong")
    port = next(ports)
    common = ["-p", "shm", "-e", "rdm", "-I", str(rounds), "-S", str(size)]
    with Server(["taskset", "-c", ANSWERING, "fi_pingpong", *common, "-B", str(port)], port) as server:
        text = output(["taskset", "-c", MEASURING, "fi_pingpong", *common, "-P", str(port), "127.0.0.1"])
        server.stop(2)
    row = [line.split() for line in text.splitlines() if line.strip()][-1]
    try:
        return {"p50_ns": 2000 * float(row[-2]), "min_ns": None}
    except (ValueError, IndexError):
        raise Missing(f"output not understood: {' '.join(row)}") from None


def perftest(program, device, gid, *arguments):
    installed(program)
    port = next(ports)
    command = [program, "-F", "-d", device, "-x", gid, "-p", str(port), *arguments]
    with Server(["taskset", "-c", ANSWERING, *command], port) as server:
        text = output(["taskset", "-c", MEASURING, *command, "127.0.0.1"])
        server.stop(2)
    return row_of_numbers(text, 5)


def write_lat(device, gid, size, rounds):
    """One way, doubled: t_typical is the median."""
    row = perftest("ib_write_lat", device, gid, "-s", str(max(size, 1)), "-n", str(rounds))
    return {"p50_ns": 2000 * row[4], "min_ns": 2000 * row[2]}


def write_bw(device, gid, size, rounds):
    """Messages both ways per second."""
    row = perftest("ib_write_bw", device, gid, "-b", "-s", str(size), "-n", str(rounds))
    return {"per_s": 1e6 * row[4]}


def median(values):
    return sorted(values)[len(values) // 2]


def interleaved(programs, rounds):
    """Runs `{name: measurement}` in turn; the first is the base. Gives one row for each."""
    samples = {name: [] for name in programs}
    missing = {}
    for number in range(rounds):
        names = list(programs)
        for name in names if number % 2 == 0 else reversed(names):
            if name in missing:
                continue
            try:
                samples[name].append((number, programs[name]()))
            except Missing as reason:
                # A peer that failed once is left out from then on; what it gave before stays, with the reason.
                missing[name] = str(reason)
    base = dict(next(iter(samples.values())))
    rows = []
    for name, figures in samples.items():
        row = {"program": name}
        if name in missing:
            row["missing"] = missing[name]
        if figures:
            key = "per_s" if "per_s" in figures[0][1] else "p50_ns"
            values = [figure[key] for _, figure in figures]
            ordered = sorted(values)
            row[key] = median(values)
            row["spread"] = round((ordered[len(values) * 3 // 4] - ordered[len(values) // 4]) / median(values), 3)
            least = [figure["min_ns"] for _, figure in figures if figure.get("min_ns") is not None]
            row["min_ns"] = min(least) if least else None
            if key == "per_s":
                row["max_per_s"] = ordered[-1]
            ratios = [figure[key] / base[number][key] for number, figure in figures if number in base]
            row["ratio"] = round(median(ratios), 3) if ratios else None
            row["rounds"] = len(values)
            row["samples"] = values
        rows.append(row)
    return rows


def measure(options):
    tables = []

    def table(title, base, size, programs):
        rows = interleaved(programs, options.rounds)
        tables.append({"title": title, "base": base, "payload_bytes": size, "rows": rows})
        show(tables[-1])

    if options.part == "host":
        ours = Ours(["--data-path", "shm"])
        for size in options.sizes:
            rounds, block = max(2000, 100_000 // (1 + size // 1024)), 20
            warmup = 1000
            programs = {"floor": lambda: floor(0, rounds, warmup, block)}
            if size:
                programs["floor that copies"] = lambda: floor(size, rounds, warmup, block)
            programs |= {
                "ours, shared memory": lambda: ours.latency(size, rounds, warmup, block),
                "UCX put, posix": lambda: ucx("put_lat", "posix", size, rounds, warmup),
                "UCX put, sysv": lambda: ucx("put_lat", "sysv", size, rounds, warmup),
                "UCX active message, posix": lambda: ucx("am_lat", "posix", size, rounds, warmup),
                "iceoryx2 publish-subscribe": lambda: iceoryx2("publish", size, rounds, warmup, block),
                "iceoryx2 request-response": lambda: iceoryx2("request", size, rounds, warmup, block),
                "libfabric shm": lambda: libfabric(size, rounds),
            }
            table("host, round trip", "floor", size, programs)
    else:
        device, gid = options.device, options.gid_index
        ours = Ours(["--data-path", "verbs", "-d", device])
        for size in options.sizes:
            rounds = 1000 if size <= 4096 else 100
            table("verbs, round trip", "perftest", size, {
                "ib_write_lat, doubled": lambda: write_lat(device, gid, size, rounds),
                "ours, verbs": lambda: ours.latency(size, rounds, 0, 1),
            })
        table("verbs, messages both ways, 64 rounds in flight", "perftest", 16, {
            "ib_write_bw -b": lambda: write_bw(device, gid, 16, 5000),
            "ours, verbs": lambda: ours.messages(16, 5000, 0),
        })
    ours.stop()
    with open(options.out, "w") as out:
        json.dump({"part": options.part, "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                   "rounds": options.rounds, "tables": tables}, out, indent=1)


def show(table):
    print(f"\n{table['title']}, {table['payload_bytes']} bytes")
    print(f"{'program':<28} {'median':>12} {'best':>12} {'spread':>7} {'× ' + table['base']:>10}")
    for row in table["rows"]:
        if "ratio" in row:
            rate = "per_s" in row
            middle = f"{row['per_s']:.0f}/s" if rate else f"{row['p50_ns']:.0f} ns"
            best = row["max_per_s"] if rate else row["min_ns"]
            best = "-" if best is None else f"{best:.0f}/s" if rate else f"{best:.0f} ns"
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            print(f"{row['program']:<28} {middle:>12} {best:>12} {row['spread'] * 100:>6.0f}% {ratio:>10}", end="")
            print(f"   after {row['rounds']} rounds: {row['missing']}" if "missing" in row else "")
        else:
            print(f"{row['program']:<28} missing: {row.get('missing')}")
    sys.stdout.flush()


def report(path):
    parts = {}
    for part in ("host", "device"):
        try:
            with open(f"target/compare-{part}.json") as file:
                parts[part] = json.load(file)
        except FileNotFoundError:
            parts[part] = None
    with open(path, "w") as file:
        json.dump(parts, file, indent=1)
    print(f"\nratios: medians over rounds, each divided by the base of its round. Written to {path}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["host", "device", "report"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")],
                        default=[0, 8, 16, 40, 128, 512, 4096, 65536])
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--gid-index", default="1")
    parser.add_argument("out")
    options = parser.parse_args()
    if options.part == "report":
        report(options.out)
    else:
        measure(options)


if __name__ == "__main__":
    main()
