// Plays what is pushed, without a gap as long as there is something; tells what was played and what was missing.

const REPORT_SAMPLES = 2400;

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.reset();
    this.port.onmessage = ({ data }) => this[data.do](data);
  }

  reset() {
    this.queue = [];
    this.offset = 0; // in the first of the queue
    this.played = 0; // samples
    this.missing = 0; // samples of silence between sounds
    this.underruns = 0;
    this.silent = 0; // samples of silence since the last sound: missing only when another one follows
    this.ended = false;
    this.unreported = 0;
  }

  push({ samples }) {
    if (this.silent) {
      this.underruns += 1;
      this.missing += this.silent;
      this.silent = 0;
    }
    this.queue.push(samples);
  }

  end() {
    this.ended = true;
    if (!this.queue.length) this.report(true);
  }

  stop() {
    this.report(true);
    this.reset();
  }

  report(over) {
    this.unreported = 0;
    const { played, missing, underruns } = this;
    this.port.postMessage({ played, missing, underruns, over });
  }

  process(inputs, [[output]]) {
    let filled = 0;
    while (filled < output.length && this.queue.length) {
      const part = this.queue[0].subarray(this.offset, this.offset + output.length - filled);
      output.set(part, filled);
      filled += part.length;
      this.offset += part.length;
      if (this.offset === this.queue[0].length) {
        this.queue.shift();
        this.offset = 0;
      }
    }
    this.played += filled;
    if (this.played && !this.ended) this.silent += output.length - filled;
    this.unreported += filled;
    const over = filled > 0 && !this.queue.length && this.ended;
    if (over || this.unreported >= REPORT_SAMPLES) this.report(over);
    return true;
  }
}

registerProcessor("player", Player);
