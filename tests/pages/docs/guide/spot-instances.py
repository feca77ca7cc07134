import time
from pathlib import Path

import safetensors

Path("run").mkdir(exist_ok=True)
time.sleep = lambda seconds: None
