import numpy as np

import pccl

gradients = np.ones(1000, np.float32)
