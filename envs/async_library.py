"""What to do about code that meets another event loop than its own.

Knows how asyncio and Trio complain; not where the code runs.
"""


def wrong_loop(error: BaseException, async_library: str) -> str:
    """Advice, if the error comes from the wrong loop or from none; else nothing.

    Args:
        error: what user code raised.
        async_library: whose loop its async functions run on.
    """
    text = str(error) if isinstance(error, RuntimeError | TypeError) else ""
    if "no running event loop" in text or "no current event loop" in text or "unrecognized yield message" in text:
        if async_library == "trio":
            return 'Code that is written for asyncio needs environment.async_library = "asyncio"'
        return 'A plain function has no loop in its thread: make it async, or set environment.isolation = "inline"'
    if async_library == "asyncio" and "must be called from async context" in text:
        return 'Code that is written for Trio needs environment.async_library = "trio"'
    return ""
