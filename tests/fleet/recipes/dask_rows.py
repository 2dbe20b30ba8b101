import json
import sys

from dask.distributed import Client

from ckptool import fleet

if __name__ == "__main__":
    with Client() as client:  # Client("scheduler:8786") is a cluster's
        for row in client.gather(client.map(fleet.row, sys.argv[1:])):
            print(json.dumps(row))
