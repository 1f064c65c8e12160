"""One HTML page of a run: curves, pictures as they evolve, health. Several runs are compared.

    python scripts/report.py logs/RUN [logs/RUN2 ...] [--out FILE]
    python scripts/report.py logs/RUN --watch        # a page on this machine that follows the run

Without --out it is report.html in the first run's folder.
"""

from argparse import Namespace
from pathlib import Path

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.errors import UserError
from flow_grpo.show.page import FILE, write_page
from flow_grpo.show.serving import build_server

PORT = 8700
HOST = "127.0.0.1"


def watch(folders: list[Path], host: str, port: int) -> None:
    server = build_server(folders, host, port)
    print(f"follow the run at http://{host}:{server.server_port}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, like logs/RUN")
    parser.add_argument("--out", type=Path, help=f"if not given, {FILE} in the first run's folder")
    parser.add_argument("--watch", action="store_true", help="serve a page that follows the runs")
    parser.add_argument(
        "--port", type=int, help=f"of --watch, if not given {PORT}; 0 takes any free one"
    )
    parser.add_argument(
        "--host",
        help=f"of --watch, if not given {HOST}; 0.0.0.0 lets everybody in your network in",
    )
    args = parser.parse_args()
    told_plainly(lambda: show(args), debug=False)


def show(args: Namespace) -> None:
    if args.watch and args.out:
        raise UserError("--watch writes no file; leave out --out")
    if args.watch:
        port = PORT if args.port is None else args.port
        watch(args.runs, HOST if args.host is None else args.host, port)
        return
    for name in ("port", "host"):
        if (value := getattr(args, name)) is not None:
            raise UserError(f"--{name} {value} has no effect without --watch; leave it out")
    out = args.out or args.runs[0] / FILE
    write_page(args.runs, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
