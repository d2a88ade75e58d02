from pcomm.inference.roofline.bandwidth import MemoryBandwidth as MemoryBandwidth
from pcomm.inference.roofline.bandwidth_meter import BandwidthMeter as BandwidthMeter
from pcomm.inference.roofline.decode_stats import DecodeStats as DecodeStats
from pcomm.inference.roofline.step_bytes import StepBytes as StepBytes
from pcomm.inference.roofline.step_weights import ExpertWeights as ExpertWeights
from pcomm.inference.roofline.step_weights import StepWeights as StepWeights
