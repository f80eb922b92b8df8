"""Runs perf_analyzer over gRPC streaming against a server that is up, and prints what it means for decoupled models.

    ./scripts/perf_analyzer.sh
    ./scripts/perf_analyzer.sh --only omni_bls_text,talker -- --concurrency-range 1:64:21

What follows -- goes to perf_analyzer. Exported profiles, its reports and report.json are left in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import children, levels, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INPUTS = HERE / "inputs"
CASES = {
    "omni_bls_text": "omni_bls",
    "omni_bls_audio": "omni_bls",
    "thinker_text": "thinker",
    "thinker_audio": "thinker",
    "talker": "talker",  # a session is one request, START and END
    "code2wav": "code2wav",  # an utterance is a sequence of chunks
}
COMPOSING = ("thinker", "talker", "code2wav")
ANSWER_TIMEOUT_S = 600
LOADS = ("--concurrency-range", "--request-rate-range", "--periodic-concurrency-range", "--request-intervals")
COUNTS = ("--request-count", "--measurement-mode", "--measurement-interval", "-p")
# Unless what follows -- says otherwise. perf_analyzer takes an exact count at a single level only.
DEFAULT_LOAD = ("--concurrency-range", "16")
DEFAULT_COUNT = ("--request-count", "64")
# Three windows of 16 requests, stable or not: speech has levels at which windows never agree within 10 %.
DEFAULT_COUNT_OF_LEVELS = (
    *("--measurement-mode", "count_windows", "--measurement-request-count", "16"),
    *("--stability-percentage", "999"),
)


def server_answers(client: Any) -> bool:
    from tritonclient.utils import InferenceServerException

    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False


def server_statistics(client: Any) -> dict[str, Any]:
    """Model name -> its statistics."""
    stats = client.get_inference_statistics(as_json=True)
    return {one["name"]: one for one in stats.get("model_stats", [])}


def talker_input(client: Any, out: Path) -> Path:
    """The shipped talker.json, which has the published vocabulary's ids, with those of the server's checkpoint: the
    prompt as its thinker makes it, and its answer. Raises RuntimeError when the thinker answers with an error.
    """
    import numpy as np
    import tritonclient.grpc as grpc

    request = json.loads((INPUTS / "thinker_text.json").read_text())["data"][0]["REQUEST"]
    tensor = grpc.InferInput("REQUEST", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(request, np.object_))
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrived.put(error or result))
    client.async_stream_infer("thinker", [tensor], enable_empty_final_response=True)
    ids: dict[str, list[int]] = {"PROMPT_TOKEN_IDS": [], "TOKEN_IDS": []}
    final = False
    while not final:
        result = arrived.get(timeout=ANSWER_TIMEOUT_S)
        if isinstance(result, Exception):
            raise RuntimeError(f"the thinker did not answer: {result}")
        for name in ids:
            values = result.as_numpy(name)
            ids[name] += [] if values is None else values.tolist()
        final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    content = json.loads((INPUTS / "talker.json").read_text())
    content["data"][0][0] |= {name: {"content": values, "shape": [len(values)]} for name, values in ids.items()}
    path = out / "talker.input.json"
    path.write_text(json.dumps(content))
    return path


def command(tool: Sequence[str], case: str, url: str, data: Path, given: Sequence[str]) -> list[str]:
    """perf_analyzer's command line for one case. Its files are named without a directory: those of the composing models
    get a prefix.
    """
    model = CASES[case]
    words = [*tool, "-m", model, "-u", url, "-i", "grpc", "--streaming", "--async", "--input-data", str(data)]
    words += ["--profile-export-file", f"{case}.profile.json", "-f", f"{case}.csv"]
    if model == "omni_bls":
        words += ["--bls-composing-models", ",".join(COMPOSING)]
    if "--sequence-id-range" not in given:  # an earlier run's ids may still be open
        words += ["--sequence-id-range", str(random.randrange(1, 2**31))]
    names = {word.partition("=")[0] for word in given}
    loaded, counted = names.intersection(LOADS), names.intersection(COUNTS)
    words += () if loaded else DEFAULT_LOAD
    words += () if counted else DEFAULT_COUNT_OF_LEVELS if loaded else DEFAULT_COUNT
    return [*words, *given]


def read_profile(path: Path) -> dict[str, Any]:
    """What perf_analyzer exports; it copies MEDIA into it byte by byte, which is no UTF-8."""
    profile: dict[str, Any] = json.loads(path.read_bytes().decode(errors="replace"), strict=False)
    return profile


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Case -> its levels and children, and perf_analyzer's command."""
    import tritonclient.grpc as grpc

    arguments.out.mkdir(parents=True, exist_ok=True)
    tool = shlex.split(arguments.tool)
    report: dict[str, Any] = {}
    with grpc.InferenceServerClient(arguments.url) as client:
        if not server_answers(client):
            raise RuntimeError(f"no tritonserver that is ready answers at {arguments.url} (gRPC); --url names another")
        for case in arguments.only:
            print(f"==> {case}", flush=True)
            data = talker_input(client, arguments.out) if case == "talker" else INPUTS / f"{case}.json"
            words = command(tool, case, arguments.url, data, arguments.given)
            profile = arguments.out / f"{case}.profile.json"
            profile.unlink(missing_ok=True)  # the tool wants to make it itself
            before = server_statistics(client)
            subprocess.run(words, check=True, cwd=arguments.out)
            after = server_statistics(client)
            measured = levels(read_profile(profile))
            report[case] = {
                "model": CASES[case],
                "command": shlex.join([Path(words[len(tool) - 1]).name, *words[len(tool) :]]),
                "levels": [dataclasses.asdict(one) for one in measured],
                "children": [dataclasses.asdict(one) for one in children(before, after, CASES[case])],
            }
            (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def print_report(report: dict[str, Any]) -> None:
    print("\nResponses, from the client's side: medians and 99th percentiles; gap: between two responses of a request")
    print(table({"case": case} | level for case, one in report.items() for level in one["levels"]))
    below = [{"case": case} | child for case, one in report.items() if one["children"] for child in one["children"]]
    if below:
        print(
            "\nThe models below, from Triton's statistics over all levels: requests per request of the measured model,"
        )
        print(
            "ms in the queue and in execute (thinker and talker only take a request over there), requests per execute"
        )
        print(table(below))


def main() -> int:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        prog="perf_analyzer.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="127.0.0.1:9001", help="Triton's gRPC address (default: serve.sh's)")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "perf_analyzer", help="directory for the results")
    arguments = parser.parse_args(sys.argv[1:cut])
    arguments.out = arguments.out.resolve()
    arguments.given = sys.argv[cut + 1 :]
    arguments.only = arguments.only.split(",")
    for case in arguments.only:
        if case not in CASES:
            parser.error(f"--only: {case!r} is none of {', '.join(CASES)}")
    try:
        report = measure(arguments)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: perf_analyzer ended with code {error.returncode}; its message is above", file=sys.stderr)
        return 1
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
