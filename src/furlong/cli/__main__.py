"""``python -m furlong.cli``."""

from furlong.cli import main

main()
