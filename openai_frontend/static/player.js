// The loudspeaker: one answer at a time.

import { samplesOf } from "./realtime.js";

export const RATE_HZ = 24000;

export class Player {
  // `onReport` takes {played, missing, underruns, over}: samples, but underruns; over: all that came was played.
  constructor(onReport) {
    this.onReport = onReport;
    this.node = null;
    this.received = 0;
  }

  // Browsers want a gesture of the user's first.
  async open() {
    if (!this.context) {
      this.context = new AudioContext({ sampleRate: RATE_HZ });
      this.opening = this.context.audioWorklet.addModule("/static/player-worklet.js").then(() => {
        this.node = new AudioWorkletNode(this.context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
        this.node.port.onmessage = ({ data }) => this.take(data);
        this.node.connect(this.context.destination);
      });
    }
    await this.opening;
    await this.context.resume();
  }

  take(report) {
    if (report.over) this.stopped?.(report.played);
    this.onReport(report);
  }

  push(base64) {
    const samples = samplesOf(base64);
    this.received += samples.length;
    this.node?.port.postMessage({ do: "push", samples }, [samples.buffer]);
  }

  // Nothing more will come for this answer.
  end() {
    this.node?.port.postMessage({ do: "end" });
  }

  // Silence now. Resolves to the samples of this answer that were played.
  async stop() {
    this.received = 0;
    if (!this.node) return 0;
    return new Promise((resolve) => {
      this.stopped = resolve;
      this.node.port.postMessage({ do: "stop" });
    });
  }
}
