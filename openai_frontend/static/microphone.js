// The microphone, with the loudspeaker's echo taken out by the browser.

const WANTED = { audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 } };

export class Microphone {
  // `onSamples` takes pieces of float samples at 24 kHz.
  constructor(onSamples) {
    this.onSamples = onSamples;
  }

  async start() {
    this.stream = await navigator.mediaDevices.getUserMedia(WANTED);
    this.context = new AudioContext(); // at the device's own rate, which not every browser can change
    await this.context.audioWorklet.addModule("/static/microphone-worklet.js");
    const node = new AudioWorkletNode(this.context, "microphone", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    node.port.onmessage = ({ data }) => this.onSamples(data);
    this.context.createMediaStreamSource(this.stream).connect(node);
  }

  async stop() {
    this.stream?.getTracks().forEach((track) => track.stop());
    await this.context?.close();
    this.stream = this.context = null;
  }
}
