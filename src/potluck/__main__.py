"""`python -m potluck`: where the script is not on the path."""

from potluck.cli.entry import main

if __name__ == "__main__":
    main()
