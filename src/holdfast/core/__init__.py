"""Words everyone uses: addresses, requests, errors, ports. Imports nothing of ours."""
