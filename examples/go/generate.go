// A client in Go with the code that protoc makes: stream, cancel, deadline, error details, retries of the service
// config, planes of the page map. Ends with exit code 1 if anything is not as it should be.
//
//	examples/go/run.sh [ADDRESS]
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"net"
	"os"
	"sort"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health" // its client side serves healthCheckConfig of the service config
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "kvatlas.dev/gen/go/kvatlas/v1"
)

const reserved = 5

type client struct {
	generation pb.GenerationServiceClient
	cache      pb.CacheServiceClient
}

func main() {
	log.SetFlags(0)
	address, configFile := "127.0.0.1:50051", "examples/service_config.json"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if len(os.Args) > 2 {
		configFile = os.Args[2]
	}
	config, err := os.ReadFile(configFile)
	must(err)
	connection := dial(address, string(config))
	defer connection.Close()
	c := client{pb.NewGenerationServiceClient(connection), pb.NewCacheServiceClient(connection)}
	for _, step := range []func(){c.stream, c.cancel, c.deadline, c.refused, c.pages, func() { retry(string(config)) }} {
		step()
	}
	fmt.Println("all as it should be")
}

// One connection, reused.
func dial(address, config string) *grpc.ClientConn {
	connection, err := grpc.Dial(
		address,
		grpc.WithInsecure(),
		grpc.WithDefaultServiceConfig(config),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	)
	must(err)
	return connection
}

// Always a deadline; the token of KVATLAS_TOKEN, if there is one.
func within(limit time.Duration) (context.Context, context.CancelFunc) {
	ctx := context.Background()
	if token := os.Getenv("KVATLAS_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	return context.WithTimeout(ctx, limit)
}

// The order of a stream: started, deltas without a gap, one end per choice, the summary, status OK.
func (c client) stream() {
	ctx, cancel := within(time.Minute)
	defer cancel() // a stream that is not read to its end is cancelled
	answer, err := c.generation.StreamGenerate(ctx, &pb.StreamGenerateRequest{Spec: &pb.GenerationSpec{
		Prompt:   &pb.GenerationSpec_Text{Text: "The sky is"},
		Sampling: &pb.SamplingParams{Temperature: proto.Float32(0)},
		Stop:     &pb.StopCriteria{MaxTokens: proto.Uint32(12)},
	}})
	must(err)
	var kinds []string
	var text strings.Builder
	tokens := uint64(0)
	for {
		message, err := answer.Recv()
		if err != nil {
			check(err.Error() == "EOF", "the stream failed: %v", err)
			break
		}
		switch event := message.Event.(type) {
		case *pb.StreamGenerateResponse_Started:
			kinds = append(kinds, "started")
		case *pb.StreamGenerateResponse_Delta:
			kinds = append(kinds, "delta")
			check(uint64(event.Delta.TokenOffset) == tokens, "a gap in the stream")
			tokens += uint64(event.Delta.TokenCount)
			text.WriteString(event.Delta.Text)
		case *pb.StreamGenerateResponse_ChoiceFinished:
			kinds = append(kinds, "choice_finished")
		case *pb.StreamGenerateResponse_Summary:
			kinds = append(kinds, "summary")
		}
	}
	check(len(kinds) > 3 && kinds[0] == "started", "the stream begins with %v", kinds)
	end := strings.Join(kinds[len(kinds)-2:], " ")
	check(end == "choice_finished summary", "the stream ends with %s", end)
	fmt.Printf("stream: %d tokens:%s\n", tokens, strings.ReplaceAll(text.String(), "\n", " "))
}

func endless(text string) *pb.StreamGenerateRequest {
	return &pb.StreamGenerateRequest{Spec: &pb.GenerationSpec{
		Prompt: &pb.GenerationSpec_Text{Text: text},
		Stop:   &pb.StopCriteria{MaxTokens: proto.Uint32(1000), IgnoreEos: true},
	}}
}

// Leaving the loop is not enough: the context of the call is cancelled, and its pages go back to the pool.
func (c client) cancel() {
	ctx, cancel := within(time.Minute)
	defer cancel()
	answer, err := c.generation.StreamGenerate(ctx, endless("Count: 1, 2, 3,"))
	must(err)
	deltas := 0
	for err == nil {
		var message *pb.StreamGenerateResponse
		if message, err = answer.Recv(); err == nil && message.GetDelta() != nil {
			if deltas++; deltas == 5 {
				cancel()
			}
		}
	}
	check(status.Code(err) == codes.Canceled, "the cancelled stream ended with %v", err)
	active := uint32(1)
	for limit := time.Now().Add(10 * time.Second); active > 0 && time.Now().Before(limit); time.Sleep(20 * time.Millisecond) {
		look, done := within(10 * time.Second)
		pool, err := c.cache.GetPagePool(look, &pb.GetPagePoolRequest{})
		done()
		must(err)
		active = uint32(pool.Stats.ActivePages)
	}
	check(active == 0, "%d pages in use after a cancel", active)
	fmt.Printf("cancel: after %d deltas, no page in use\n", deltas)
}

// A deadline ends the call wherever it is.
func (c client) deadline() {
	ctx, cancel := within(200 * time.Millisecond)
	defer cancel()
	answer, err := c.generation.StreamGenerate(ctx, endless("Once upon a time"))
	for err == nil {
		_, err = answer.Recv()
	}
	check(status.Code(err) == codes.DeadlineExceeded, "ended with %v", err)
	fmt.Println("deadline: DEADLINE_EXCEEDED after 200 ms")
}

// Reason and violations are details of the status.
func (c client) refused() {
	ctx, cancel := within(10 * time.Second)
	defer cancel()
	_, err := c.generation.Generate(ctx, &pb.GenerateRequest{Spec: &pb.GenerationSpec{
		Prompt:   &pb.GenerationSpec_Text{Text: "x"},
		Sampling: &pb.SamplingParams{Temperature: proto.Float32(9), TopP: proto.Float32(7)},
	}})
	check(status.Code(err) == codes.InvalidArgument, "refused with %v", err)
	reason, fields := "", []string{}
	for _, detail := range status.Convert(err).Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = found.Reason
		case *errdetails.BadRequest:
			for _, violation := range found.FieldViolations {
				fields = append(fields, violation.Field)
			}
		}
	}
	sort.Strings(fields)
	at := strings.Join(fields, ", ")
	check(reason == "INVALID_FIELD" && at == "spec.sampling.temperature, spec.sampling.top_p", "%s at %s", reason, at)
	fmt.Printf("refused: %s at %s\n", reason, at)
}

// Planes are arrays without a header, little endian.
func (c client) pages() {
	ctx, cancel := within(10 * time.Second)
	defer cancel()
	feed, err := c.cache.WatchPageMap(ctx, &pb.WatchPageMapRequest{Planes: []string{"states", "used_ms"}})
	must(err)
	var geometry *pb.PoolGeometry
	states := []byte{}
	for isWhole := false; !isWhole; {
		message, err := feed.Recv()
		must(err)
		part := message.GetSnapshot()
		check(part != nil, "no snapshot at first")
		if geometry == nil {
			geometry = part.Geometry
		}
		if part.PageCount > 0 {
			states = append(states, part.Pages.States...)
			used := make([]uint32, part.PageCount)
			for i := range used {
				used[i] = binary.LittleEndian.Uint32(part.Pages.UsedMs[4*i:])
			}
			check(len(part.Pages.UsedMs) == 4*len(used), "a plane of another length")
		}
		isWhole = part.ChunksLeft == 0
	}
	check(len(states) == int(geometry.PageCount), "%d pages", len(states))
	count := 0
	for _, state := range states {
		if state == reserved {
			count++
		}
	}
	check(count == 1, "%d reserved pages", count)
	fmt.Printf("pages: %d of %d tokens each\n", len(states), geometry.PageSize)
}

// A server that is not ready twice, and says when to come back.
type unready struct {
	pb.UnimplementedGenerationServiceServer
	attempts int32
}

func (u *unready) StreamGenerate(_ *pb.StreamGenerateRequest, answer pb.GenerationService_StreamGenerateServer) error {
	if atomic.AddInt32(&u.attempts, 1) < 3 {
		answer.SetTrailer(metadata.Pairs("grpc-retry-pushback-ms", "20"))
		return status.Error(codes.Unavailable, "loading")
	}
	return answer.Send(&pb.StreamGenerateResponse{
		Event: &pb.StreamGenerateResponse_Summary{Summary: &pb.GenerationSummary{}},
	})
}

// Until a server has taken a call, gRPC sends it again by itself, as service_config.json says.
func retry(config string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	server, service, states := grpc.NewServer(), &unready{}, health.NewServer()
	pb.RegisterGenerationServiceServer(server, service)
	// Whoever checks health, as the service config asks for, logs an error of a server that tells of none.
	states.SetServingStatus("kvatlas.v1.GenerationService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(server, states)
	go server.Serve(listener)
	defer server.Stop()
	connection := dial(listener.Addr().String(), config)
	defer connection.Close()
	ctx, cancel := within(10 * time.Second)
	defer cancel()
	answer, err := pb.NewGenerationServiceClient(connection).StreamGenerate(ctx, endless("x"))
	must(err)
	message, err := answer.Recv()
	must(err)
	attempts := atomic.LoadInt32(&service.attempts)
	check(message.GetSummary() != nil && attempts == 3, "%d attempts", attempts)
	fmt.Printf("retry: taken at attempt %d\n", attempts)
}

func must(err error) {
	if err != nil {
		log.Fatalf("failed: %v", err)
	}
}

func check(isTrue bool, otherwise string, values ...interface{}) {
	if !isTrue {
		log.Fatalf(otherwise, values...)
	}
}
