"""The test suites of others, run while everything that they save and load goes through ckptool, too."""
