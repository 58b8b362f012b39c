"""``python -m fa_inductor VERB``: each verb is one function ``main(argv) -> exit status`` in a module of its own."""
from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("fa_inductor.demo", "encode sentences with a real model, beside plain torch.compile"),
    "doctor": ("fa_inductor.doctor", "versions, GPU, kernel compiler and caches of this machine"),
    "zoo": ("fa_inductor.zoo", "blocks found and rewritten in small transformers models, against float64"),
}
"""Verb: (module that has ``main``, one line of help).  A module is imported only when its verb is called."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status of the process: 0 when the verb succeeded, 2 for wrong arguments.
    """
    from . import __version__

    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="python -m fa_inductor", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Attention at FlashAttention-3/4 speed, with no change to the model.",
        epilog=f"verbs:\n{verbs}\n\n'python -m fa_inductor VERB --help' shows the options of a verb.")
    parser.add_argument("--version", action="version", version=f"fa_inductor {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do; see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the verb")
    parsed = parser.parse_args(argv)
    return importlib.import_module(VERBS[parsed.verb][0]).main(parsed.arguments)


def _leave_checkout() -> None:
    """Drop the current folder from the import path when it is a checkout of this project.

    Its folder ``kernels`` would hide the Hugging Face package of that name from transformers.  The installed
    package (also an editable one) does not need the folder on the path.
    """
    here = Path(__file__).resolve().parent.parent
    if (here / "kernels").is_dir():
        sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != here]


if __name__ == "__main__":
    _leave_checkout()
    sys.exit(main())
