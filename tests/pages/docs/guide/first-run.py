import time

time.sleep = lambda seconds: None
