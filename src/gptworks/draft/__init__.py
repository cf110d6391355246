"""Draft recipes sized for a folder of texts and this machine, written as ordinary files with the reasons."""
