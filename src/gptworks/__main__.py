"""Run the command line as `python -m gptworks`."""

from gptworks.cli import main

if __name__ == "__main__":
    main()
