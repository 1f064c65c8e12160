"""Write an HTML report of one or several runs: curves, samples over time, health checks.

    python scripts/report.py logs/RUN [logs/RUN2 ...] [--out FILE]
    python scripts/report.py logs/RUN --watch        # serve a local page that follows the run

Without --out the report is report.html in the first run's directory.
"""

from argparse import Namespace
from pathlib import Path

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error
from flow_grpo.errors import UserError
from flow_grpo.report.page import REPORT_FILE, write_report
from flow_grpo.report.server import build_server

PORT = 8700
HOST = "127.0.0.1"


def watch(folders: list[Path], host: str, port: int) -> None:
    """Serve a page that follows the runs, until Ctrl-C."""
    server = build_server(folders, host, port)
    print(f"follow the run at http://{host}:{server.server_port}; Ctrl-C to stop", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def main() -> None:
    """Parse the command line; write or serve the report."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, such as logs/RUN")
    parser.add_argument(
        "--out", type=Path, help=f"default: {REPORT_FILE} in the first run's directory"
    )
    parser.add_argument("--watch", action="store_true", help="serve a page that follows the runs")
    parser.add_argument(
        "--port", type=int, help=f"port for --watch; default {PORT}, 0: any free port"
    )
    parser.add_argument(
        "--host",
        help=f"address for --watch; default {HOST}, 0.0.0.0 exposes the page to your network",
    )
    args = parser.parse_args()
    exit_on_user_error(lambda: show(args), debug=False)


def show(args: Namespace) -> None:
    """Write the report, or serve it with --watch; reject options of the other mode."""
    if args.watch and args.out:
        raise UserError("has no effect with --watch", field="--out", hint="omit it")
    if args.watch:
        port = PORT if args.port is None else args.port
        watch(args.runs, HOST if args.host is None else args.host, port)
        return
    for name in ("port", "host"):
        if (value := getattr(args, name)) is not None:
            raise UserError(
                "has no effect without --watch", field=f"--{name}", value=value, hint="omit it"
            )
    out = args.out or args.runs[0] / REPORT_FILE
    write_report(args.runs, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
