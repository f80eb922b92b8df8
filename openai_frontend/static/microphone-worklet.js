// The microphone at 24 kHz, in pieces of 40 ms; each sample is the mean over its time, a plain low-pass.

const RATE_HZ = 24000;
const PIECE_SAMPLES = 960;

class Microphone extends AudioWorkletProcessor {
  constructor() {
    super();
    this.step = sampleRate / RATE_HZ;
    this.sum = 0;
    this.left = this.step; // of the input's samples, until the next of ours is complete
    this.piece = new Float32Array(PIECE_SAMPLES);
    this.filled = 0;
  }

  process([[input]]) {
    for (const sample of input ?? []) {
      let share = 1;
      while (this.left <= share) {
        this.sum += sample * this.left;
        share -= this.left;
        this.emit(this.sum / this.step);
        this.sum = 0;
        this.left = this.step;
      }
      this.sum += sample * share;
      this.left -= share;
    }
    return true;
  }

  emit(sample) {
    this.piece[this.filled++] = sample;
    if (this.filled === PIECE_SAMPLES) {
      this.port.postMessage(this.piece);
      this.filled = 0;
    }
  }
}

registerProcessor("microphone", Microphone);
