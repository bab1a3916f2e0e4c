"""Take a picture of a report, as in the docs: python scripts/picture_of_report.py RUN_OR_HTML out.png."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--headless=new",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def take_picture(
    page_path: Path,
    out: Path,
    *,
    is_dark: bool,
    width: int,
    height: int,
    is_whole: bool,
    opens_runs: bool = False,
) -> None:
    """Open a page in a browser without a window and save what it shows."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("a picture needs playwright: pip install 'hdet[dev]'")
    chromium = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if chromium is None:
        sys.exit(f"a picture needs a browser: none of {', '.join(CHROMIUM_NAMES)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_ARGUMENTS))
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if is_dark else "light",
            device_scale_factor=2 if width < 1000 else 1,
        )
        page.goto(page_path.resolve().as_uri())
        page.wait_for_selector("html[data-is-drawn=true]", timeout=30_000)
        if opens_runs:
            page.evaluate("for (const run of document.querySelectorAll('details.run')) run.open = true")
        page.wait_for_timeout(400)  # the last chart settles
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(out), full_page=is_whole)
        browser.close()
    shrink(out)


def shrink(picture: Path) -> None:
    """Keep the few colours that a page has: a third of the size, and nobody sees a difference."""
    from PIL import Image

    small = Image.open(picture).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def main() -> None:
    """Read the arguments, build the page if need be, take the picture."""
    parser = argparse.ArgumentParser(description="Take a picture of a report.")
    parser.add_argument("source", type=Path, help="an HTML report, or the directory of a run")
    parser.add_argument("out", type=Path, help="where the PNG goes")
    parser.add_argument("--dark", action="store_true", help="dark instead of light")
    parser.add_argument("--width", type=int, default=1280, help="width of the window in pixels")
    parser.add_argument("--height", type=int, default=900, help="height of the window in pixels")
    parser.add_argument("--whole", action="store_true", help="the whole page, not the first screen")
    parser.add_argument("--open", action="store_true", help="with the sections of all runs open")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = arguments.source
        if source.is_dir():
            from hdet.lab.page import build_report, read_run

            source = build_report([read_run(source)], Path(temporary) / "report.html")
        elif not source.is_file():
            parser.error(f"{source} is neither a file nor a directory")
        take_picture(
            source,
            arguments.out,
            is_dark=arguments.dark,
            width=arguments.width,
            height=arguments.height,
            is_whole=arguments.whole,
            opens_runs=arguments.open,
        )


if __name__ == "__main__":
    main()
