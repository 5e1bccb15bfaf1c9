"""Draw the pictures here, of the board and of report pages in Chromium: `python docs/board/pictures.py`.

The runs and benches are those in docs/examples. One run is a copy of its first 170 steps, in a folder that is
held as while it trains.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

from board_server import Server  # noqa: E402
from browser import Browser  # noqa: E402
from shardwise.record.write import RunFolder  # noqa: E402

MOST_HEIGHT = {1280: 1500, 400: 1700}
RUNNING = "small-rate-3e-3"
COMPARED = "/compare?of=small-rate-1e-3&of=small-rate-3e-3&of=small-rate-1e-2"
PAGES = {
    "runs": "/",
    "run": f"/run?of={RUNNING}",
    "compare": COMPARED,
    "plan": "/plan",
    "check": "/check",
    "report": COMPARED.replace("compare", "report"),
    "bench": "/bench?of=bench-4xh200",
}
CONFIG = '{"train_batch_size": 64, "zero_optimisation": {"stage": 3}, "bf16": {"enabled": true}}'
PREPARE = {
    "plan": "document.querySelector('#plan').requestSubmit()",
    "check": f"one('textarea').value = {CONFIG!r}; document.querySelector('#check').requestSubmit()",
}


def main() -> None:
    """Write a picture of each page at both widths, light and dark."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        root = Path(folder) / "examples"
        shutil.copytree(ROOT / "docs" / "examples", root)
        lines = (root / RUNNING / "events.jsonl").read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines[:177]]
        late = time.time() - events[-1]["time"]
        moved = (json.dumps({**event, "time": event["time"] + late}) + "\n" for event in events)
        (root / RUNNING / "events.jsonl").write_text("".join(moved))
        held, server = RunFolder.reopen(root / RUNNING), Server(root)
        for name, page in PAGES.items():
            for width, most in MOST_HEIGHT.items():
                for scheme in ("light", "dark"):
                    browser.show(server.address + page, width=width, dark=scheme == "dark")
                    if name in PREPARE:
                        browser.value(PREPARE[name])
                        browser.wait("document.querySelector('#result').innerHTML.length", 300)
                    time.sleep(3)  # streams, and the end of scrolling
                    browser.value("scrollTo(0, 0)")
                    shot = Image.open(io.BytesIO(browser.picture()))
                    small = shot.convert("RGB").crop((0, 0, width, min(most, shot.height)))
                    target = Path(__file__).with_name(f"{name}-{width}-{scheme}.png")
                    small.quantize(160, dither=Image.Dither.NONE).save(target, optimize=True)
        server.close()
        held.close()


if __name__ == "__main__":
    main()
