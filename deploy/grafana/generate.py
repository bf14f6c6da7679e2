"""Writes the dashboards' JSON, or says with --check that a file is not what the source makes.

python -m deploy.grafana.generate
python -m deploy.grafana.generate --check
"""

import argparse
import json
import sys
from pathlib import Path

from deploy.grafana import pages_board, serving_board
from deploy.grafana.render import Renderer, palette_of
from service.metric_table import TABLE as SERVICE_TABLE
from worker.readers.metric_table import TABLE as WORKER_TABLE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
PALETTE = ROOT / "dashboard" / "palette.json"
BOARDS = {"pages": pages_board.BOARD, "serving": serving_board.BOARD}


def rendered() -> dict[Path, str]:
    """File → text of every dashboard."""
    palette = palette_of(PALETTE)
    texts = {}
    for name, board in BOARDS.items():
        model = Renderer(palette, (*WORKER_TABLE, *SERVICE_TABLE)).board(board)
        texts[FOLDER / f"{name}.json"] = json.dumps(model, indent=2, ensure_ascii=False) + "\n"
    return texts


def main() -> int:
    """Writes or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a file is stale"
    )
    is_check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in rendered().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)}: {'stale' if is_check else 'written'}")
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
