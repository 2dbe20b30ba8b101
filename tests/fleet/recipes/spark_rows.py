import json
import sys

from pyspark import SparkContext

from ckptool import fleet

with SparkContext("local[*]") as spark:
    for row in spark.parallelize(sys.argv[1:]).map(fleet.row).toLocalIterator():
        print(json.dumps(row))
