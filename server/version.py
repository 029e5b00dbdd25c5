"""The version of Pequod."""


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("pequod")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
