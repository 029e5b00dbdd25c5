"""Exit code 0 when the server in this container answers 200 at the path given (default /live); for health checks."""

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0  # under the five seconds after which the container engine gives up on this process


def status(path: str) -> int:
    """The status that the server answers with; raises OSError when it does not answer."""
    port = os.environ.get("PEQUOD_PORT", "")
    scheme = "https" if os.environ.get("PEQUOD_SSL_CERTFILE") else "http"
    # Kubernetes sets PEQUOD_PORT=tcp://… for a service named pequod; the server, too, takes that for no setting.
    url = f"{scheme}://127.0.0.1:{port if port.isdigit() else 8000}{path}"
    # The certificate names the public host, and a proxy of the environment is not for this container's own port.
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else "/live"
    try:
        found = status(path)
    except OSError as error:
        print(f"{path}: {error}")
        return 1
    print(f"{path}: {found}")
    return 0 if found == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
