from pcomm.inference.roofline.decode_stats import BandwidthMeter as BandwidthMeter
from pcomm.inference.roofline.decode_stats import DecodeStats as DecodeStats
from pcomm.inference.roofline.decode_stats import MemoryBandwidth as MemoryBandwidth
from pcomm.inference.roofline.step_bytes import ExpertWeights as ExpertWeights
from pcomm.inference.roofline.step_bytes import StepBytes as StepBytes
from pcomm.inference.roofline.step_bytes import StepWeights as StepWeights
